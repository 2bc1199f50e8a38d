"""Ranks whose loaders end at different steps stop together. Pure: who carries the words is the caller's business.

Lightning asks a loader for batch k after step k − 1 when the loader has a length, and after step k − 2 when it has
none, because it then holds one batch itself. In both cases at most one step lies between the moment in which the
look-ahead holds a batch and the moment in which Lightning asks for it, and the header of that step tells whether the
batch exists on every rank. Where no step lies between (the first batch of an iteration; the second of a loader without
length; a batch that was None and had no step) the ranks ask each other directly. Lightning's loop does the same on
every rank, so that all ask or none. A loader with a length is never asked for: the ranks have agreed on it beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Ends:
    """Whether the batch that this rank holds is there on every rank. One per iteration of a loader."""

    def __init__(self) -> None:
        self._exists: bool | None = None
        self._by_rank: list[bool] | None = None

    @property
    def exists(self) -> bool:
        """What this rank tells the others. Nothing held tells nothing, it is not heard either."""
        return self._exists is not False

    def hold(self, exists: bool | None) -> None:
        """Another batch is held; False: there is none left, None: it was not looked for."""
        self._exists = exists
        self._by_rank = None

    def hear(self, by_rank: Sequence[bool]) -> None:
        """The ranks have told each other, in a header or directly."""
        if self._exists is not None and self._by_rank is None:
            self._by_rank = list(by_rank)

    @property
    def settled(self) -> bool:
        """The ranks know what each of them holds: nobody needs to ask."""
        return self._by_rank is not None

    @property
    def verdict(self) -> bool:
        """The held batch may be handed out. Only when settled."""
        assert self._by_rank is not None
        return all(self._by_rank)

    @property
    def unequal(self) -> tuple[list[int], list[int]] | None:
        """Ranks with more batches and ranks without, where that differs."""
        if self._by_rank is None or len(set(self._by_rank)) < 2:
            return None
        more, fewer = ([r for r, e in enumerate(self._by_rank) if e is exists] for exists in (True, False))
        return more, fewer


class AgreedLength(NamedTuple):
    """What all ranks take for the length of a loader.

    Attributes:
        length: The smallest; None: some rank's loader has none, then all count as loaders without length.
        warning: What to say once, when the ranks differ.
    """

    length: int | None
    warning: str | None


def agree_length(lengths: Sequence[int | None], allow_empty: bool = False) -> AgreedLength:
    """Agrees on the length of a loader.

    Args:
        lengths: By rank; None: it has none.
        allow_empty: The model allows loaders of length zero on some ranks.

    Returns:
        The agreed length.

    Raises:
        ValueError: Some ranks have no batch at all while others have some.
    """
    known = [n for n in lengths if n is not None]
    if len(known) < len(lengths):
        if not known:
            return AgreedLength(None, None)
        without = _ranks([r for r, n in enumerate(lengths) if n is None])
        return AgreedLength(None, f"The training loader has a length on some ranks, but none on {without}.{_TOGETHER}")
    smallest, largest = min(known), max(known)
    if smallest == largest:
        return AgreedLength(smallest, None)
    fewer = _ranks([r for r, n in enumerate(known) if n == smallest])
    if smallest == 0 and not allow_empty:
        raise ValueError(f"The training loader of {fewer} is empty, others have up to {largest} batches.{_CURE}")
    return AgreedLength(
        smallest,
        f"The training loaders have between {smallest} ({fewer}) and {largest} batches.{_TOGETHER}",
    )


def describe_unequal(more: Sequence[int], fewer: Sequence[int], batches: int) -> str:
    """What to say when the ranks' loaders turn out to end at different batches."""
    return f"The training loader of {_ranks(fewer)} ended after {batches} batches, {_ranks(more)} had more.{_TOGETHER}"


def describe_refused(more: Sequence[int], fewer: Sequence[int], batches: int) -> str:
    """The same as an error."""
    return f"The training loader of {_ranks(fewer)} ended after {batches} batches, {_ranks(more)} had more.{_CURE}"


_CURE = (
    " Give every rank the same number of batches: `limit_train_batches`, or a sampler that pads or drops"
    " (DistributedSampler does)."
)
_TOGETHER = " All ranks stop where the first one ends, and the rest of the others' data is not trained on." + _CURE


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
