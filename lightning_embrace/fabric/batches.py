"""Loaders of a user's own loop that hold one batch ahead. Nothing here communicates: where they end, the loop ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_embrace.lookahead.ahead import DRAWS, Pair
from lightning_embrace.lookahead.loader import Habits, Item, Iteration, Terms, is_stateful


class Batches:
    """What the loaders have handed out since the last forward pass, and what will follow it.

    Args:
        warn: Shows a warning to the user.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned = False
        self._loaders = 0
        self._handed: dict[int, tuple[Any, Item | None]] = {}

    def wrap(self, loader: Any) -> Any:
        """A loader that holds one batch ahead, unless it keeps a state, which would be that of one batch ahead."""
        if is_stateful(loader):
            return loader
        self._loaders += 1
        return ForeseeingLoader(loader, self, self._loaders)

    def take(self) -> Pair:
        """The batches since the last call, and their successors; a tuple of them where several loaders gave some."""
        handed, self._handed = self._handed, {}
        if not handed:
            return Pair()
        given = [handed[number] for number in sorted(handed)]
        followed = [item is not None and not item.ended and item.error is None for _, item in given]
        successors = [item.batch if item is not None and known else None for (_, item), known in zip(given, followed)]
        return Pair(_together([batch for batch, _ in given]), _together(successors), any(followed))

    def hand_out(self, loader: int, batch: Any, successor: Item | None) -> None:
        """A loader hands a batch out."""
        self._handed[loader] = (batch, successor)

    def warn_of_draws(self) -> None:
        """A loader draws from generators that the model has, too."""
        if not self._warned:
            self._warned = True
            self._warn(DRAWS)


class ForeseeingLoader(Iterable[Any]):
    """A loader that holds one batch ahead.

    Args:
        loader: The loader.
        batches: Where what it hands out is noted.
        number: Its number there.
    """

    def __init__(self, loader: Any, batches: Batches, number: int) -> None:
        self.__dict__.update(vars(loader))  # Fabric's wrapper takes them from here
        self._embrace = (loader, batches, number, Habits())

    def __iter__(self) -> Iterator[Any]:
        loader, batches, number, habits = self._embrace
        source = iter(loader)
        if source is loader:  # another iteration goes on with it: nothing may be held back
            return iter(source)
        return _Handout(batches, number).iteration(loader, source, habits)

    def __len__(self) -> int:
        return len(self._embrace[0])

    def __getattr__(self, name: str) -> Any:
        if name == "_embrace":  # being copied or unpickled
            raise AttributeError(name)
        return getattr(self._embrace[0], name)


class _Handout:
    """The host of one iteration (a :class:`~lightning_embrace.lookahead.loader.Host`)."""

    def __init__(self, batches: Batches, number: int) -> None:
        self._batches, self._number = batches, number
        self._iteration: Iteration | None = None

    def iteration(self, loader: Any, source: Iterator[Any], habits: Habits) -> Iteration:
        """Begins it."""
        self._iteration = Iteration(loader, source, Terms(), self, self._number, habits)
        return self._iteration

    def begin(self, index: int) -> None:
        """Does nothing."""

    def agreed(self, index: int, batches: int) -> bool:
        """Whether the batch that is held exists: here, for other ranks end where they like."""
        assert self._iteration is not None
        return self._iteration.ends.exists

    def deliver(self, index: int, batch: Any, successor: Item | None) -> None:
        """A batch is handed out."""
        self._batches.hand_out(index, batch, successor)

    def saw(self, index: int, draws: bool) -> bool:
        """Whether the loader draws random numbers."""
        if draws:
            self._batches.warn_of_draws()
        return draws


def _together(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else tuple(parts)
