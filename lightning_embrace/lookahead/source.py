"""Where the ids of the next batch come from: learned, told by the user's function, or from nowhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightning_embrace.lookahead.cover import Cover, in_range, unique_ids

LookaheadFunction = Callable[[Any], Mapping[str, Tensor]]


class Source(Protocol):
    """Foresees the look-ups of a batch. Tables are numbered; see :class:`~lightning_embrace.lookahead.cover.Cover`."""

    @property
    def learning(self) -> bool:
        """Wants to be told what was looked up."""
        ...

    @property
    def known(self) -> list[bool]:
        """The tables whose look-ups can be foreseen, by index."""
        ...

    def note(self, batch: Any) -> None:
        """A batch is about to be trained on."""
        ...

    def observe(self, looked_up: Mapping[int, Tensor]) -> None:
        """It has looked this up."""
        ...

    def ids(self, batch: Any) -> dict[int, Tensor | None]:
        """The ids that a batch will look up, or more; None: not known."""
        ...

    def checked(self, index: int, foreseen: bool) -> None:
        """Whether the ids foreseen for a table's last look-ups were enough."""
        ...

    def unlearn(self, index: int) -> None:
        """What was learned about a table does not hold."""
        ...


class Untaught:
    """A source that learns nothing, and knows nothing."""

    learning = False

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = list(rows)

    @property
    def known(self) -> list[bool]:
        """None of the tables."""
        return [False] * len(self._rows)

    def note(self, batch: Any) -> None:
        """Does nothing."""

    def observe(self, looked_up: Mapping[int, Tensor]) -> None:
        """Does nothing."""

    def ids(self, batch: Any) -> dict[int, Tensor | None]:
        """Nothing is known."""
        return dict.fromkeys(range(len(self._rows)))

    def checked(self, index: int, foreseen: bool) -> None:
        """Does nothing."""

    def unlearn(self, index: int) -> None:
        """Does nothing."""


class Told(Untaught):
    """The user's function says which ids a batch will look up.

    Args:
        function: Gets a batch as the loader gives it, returns ids by table name.
        names: Names of the tables, by index.
        rows: Number of rows of each table.
    """

    def __init__(self, function: LookaheadFunction, names: Sequence[str], rows: Sequence[int]) -> None:
        super().__init__(rows)
        self._function = function
        self._index = {name: index for index, name in enumerate(names)}

    @property
    def known(self) -> list[bool]:
        """All of the tables, as far as anybody can know beforehand."""
        return [True] * len(self._rows)

    def ids(self, batch: Any) -> dict[int, Tensor | None]:
        """Asks the function; a table that it leaves out is not known."""
        told = self._function(batch)
        if not isinstance(told, Mapping):
            raise ValueError(f"{_PREFIX}it returned {type(told).__name__}, {self._expected()}")
        ids = super().ids(batch)
        for name, tensor in told.items():
            if name not in self._index:
                raise ValueError(f"{_PREFIX}it returned ids of {name!r}, which is no sharded table; {self._expected()}")
            if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int32, torch.int64):
                what = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"{_PREFIX}for {name!r} it returned {what}, {self._expected()}")
            index = self._index[name]
            ids[index] = in_range(unique_ids(tensor), self._rows[index])
        return ids

    def _expected(self) -> str:
        names = ", ".join(map(repr, self._index)) or "none, as no table is sharded"
        return f"expected is a dictionary of int32 or int64 tensors by table name. The names are: {names}."


_PREFIX = "EmbRaceStrategy(lookahead=<function>): "


def make_source(
    lookahead: Literal["auto", "off"] | LookaheadFunction, names: Sequence[str], rows: Sequence[int]
) -> Source:
    """Builds what foresees look-ups.

    Args:
        lookahead: The strategy's argument.
        names: Names of the sharded tables, by index.
        rows: Number of rows of each.

    Returns:
        The source.

    Raises:
        ValueError: The argument is none of those allowed.
    """
    check_lookahead(lookahead)
    if callable(lookahead):
        return Told(lookahead, names, rows)
    return Cover(list(rows)) if lookahead == "auto" else Untaught(rows)


def check_lookahead(lookahead: object) -> None:
    """Raises ValueError where the strategy's argument is none of those allowed."""
    if lookahead not in ("auto", "off") and not callable(lookahead):
        raise ValueError(
            f"EmbRaceStrategy(lookahead={lookahead!r}): allowed are 'auto', 'off' and a function that gets a batch and"
            " returns {table name: ids}."
        )
