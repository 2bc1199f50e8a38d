"""The look-ahead of one fit: its wrapped loaders, which batch follows which, and where all ranks stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from torch.utils._pytree import tree_map_only

from lightning_embrace.lookahead.ends import describe_refused, describe_unequal
from lightning_embrace.lookahead.loader import Item, LookaheadLoader, Terms, wrap

#: what is said of a loader that must not be read ahead
DRAWS = (
    "The training loader draws random numbers in the training process. No batch is fetched ahead, so that it and the"
    " model get the same numbers as with ddp, and rows are exchanged when they are looked up. To overlap that with"
    " compute, load in another process (`num_workers=1`) or draw from a generator of the loader's own."
)


class Pair(NamedTuple):
    """A batch and its successor, as the loaders gave them: on the CPU, before any transfer.

    Attributes:
        current: The batch that is about to be trained on.
        successor: The batch after it, in the same structure; a loader that has ended, or is to start over, has None
            in its place.
        known: There is a successor, and it is known.
    """

    current: Any = None
    successor: Any = None
    known: bool = False


class Lookahead:
    """Wraps the training loaders of a fit. Knows neither Lightning's Trainer nor how ranks communicate.

    Args:
        ask: Tells every rank a bit and returns all ranks' by rank; called where all ranks call it.
        warn: Shows a warning to the user.
        unequal: ``"stop"`` where the first rank's loader ends, or ``"raise"`` there.
    """

    def __init__(
        self,
        ask: Callable[[bool], Sequence[bool]],
        warn: Callable[[str], None],
        unequal: Literal["stop", "raise"] = "stop",
    ) -> None:
        self._ask, self._warn, self._unequal = ask, warn, unequal
        self._loaders: list[LookaheadLoader] = []
        self._pairs: list[deque[tuple[Any, Item | None]]] = []
        self._fresh: list[bool] = []
        self._begun = self._warned = self._warned_of_draws = False

    def process(
        self, loader: Any, length: int | None = None, limit: int | float = float("inf"), ahead: bool = True
    ) -> LookaheadLoader:
        """Wraps one training loader.

        Args:
            loader: The loader, or what an earlier call returned for it.
            length: The length on which the ranks have agreed, see
                :func:`~lightning_embrace.lookahead.ends.agree_length`.
            limit: The Trainer's ``limit_train_batches``.
            ahead: False: nothing is held, the ranks only stop together.

        Returns:
            What Lightning shall use instead.
        """
        if self._begun:  # Lightning has asked for new loaders; it iterates only when it has processed all
            self.reset()
        terms = Terms(length, _limit(limit, length), ahead)
        wrapped = wrap(loader, terms, self, len(self._loaders))
        self._loaders.append(wrapped)
        self._pairs.append(deque())
        self._fresh.append(False)
        return wrapped

    def next_batch(self, structure: Any = None) -> Pair:
        """Goes on to the next batch. Call once for each that is trained on, in ``on_train_batch_start``.

        Args:
            structure: ``trainer.train_dataloader``: the wrapped loaders in the collection in which the batches come.
                May be left out for a single loader.

        Returns:
            The batch and its successor.
        """
        entries = {id(w): self._pop(i) for i, w in enumerate(self._loaders)}
        if not any(entries.values()):
            return Pair()
        if structure is None:
            structure = self._loaders[0] if len(self._loaders) == 1 else tuple(self._loaders)

        def fill(part: int) -> Any:
            def one(wrapped: LookaheadLoader) -> Any:
                entry = entries.get(id(wrapped))
                return None if entry is None else entry[part]

            return tree_map_only(LookaheadLoader, one, structure)

        known = any(entry is not None and entry[2] for entry in entries.values())
        return Pair(fill(0), fill(1) if known else None, known)

    def word(self) -> int:
        """What this rank tells the others in the header of a step: one bit per loader, whose held batch exists."""
        iterations = [w._wrapping.iteration for w in self._loaders]
        return sum(1 << i for i, iteration in enumerate(iterations) if iteration is not None and iteration.ends.exists)

    def hear(self, words: Sequence[int]) -> None:
        """All ranks' words of the step, by rank. Call once in a step, after :meth:`word` in the same step."""
        for i, wrapped in enumerate(self._loaders):
            iteration = wrapped._wrapping.iteration
            if iteration is not None:
                iteration.ends.hear([bool(word >> i & 1) for word in words])

    def reset(self) -> None:
        """Forgets the loaders and what they hold; wrappers that are left behind are nothing but their loaders.

        Call when the fit ends.
        """
        for wrapped in self._loaders:
            wrapped._wrapping.close()
        self._loaders, self._pairs, self._fresh = [], [], []
        self._begun = False

    # ---- what the wrappers call (loader.Host) --------------------------------------------------------------------

    def begin(self, index: int) -> None:
        """An iteration over one loader starts."""
        self._begun = True
        self._fresh[index] = True
        # CombinedLoader starts over with all of its loaders; one alone starts over where it cycles, and its pairs go on
        if all(self._fresh):
            for pairs in self._pairs:
                pairs.clear()

    def agreed(self, index: int, batches: int) -> bool:
        """Whether the batch that a loader holds exists on every rank."""
        wrapping = self._loaders[index]._wrapping
        assert wrapping.iteration is not None
        self._fresh[index] = False
        ends = wrapping.iteration.ends
        if not ends.settled:
            if wrapping.terms.length is not None:  # agreed beforehand
                return ends.exists
            ends.hear(self._ask(ends.exists))
        if (unequal := ends.unequal) is not None:
            if self._unequal == "raise":
                raise RuntimeError(describe_refused(*unequal, batches))
            if not self._warned:
                self._warned = True
                self._warn(describe_unequal(*unequal, batches))
        return ends.verdict

    def deliver(self, index: int, batch: Any, successor: Item | None) -> None:
        """A batch is handed out."""
        self._pairs[index].append((batch, successor))

    def saw(self, index: int, draws: bool) -> bool:
        """Whether a loader draws random numbers on some rank; then nothing is held of it."""
        if self._loaders[index]._wrapping.terms.length is None:  # where to ask follows from what is held: on all ranks
            draws = any(self._ask(draws))
        if draws and not self._warned_of_draws:
            self._warned_of_draws = True
            self._warn(DRAWS)
        return draws

    def _pop(self, index: int) -> tuple[Any, Any, bool] | None:
        pairs = self._pairs[index]
        if len(self._loaders) == 1:  # Lightning calls no hook for a batch that is None
            while pairs and pairs[0][0] is None:
                self._take(index)
        if not pairs:
            return None
        batch, item = self._take(index)
        known = item is not None and not item.ended and item.error is None
        return batch, item.batch if item is not None and known else None, known

    def _take(self, index: int) -> tuple[Any, Item | None]:
        iteration = self._loaders[index]._wrapping.iteration
        if iteration is not None:
            iteration.take()
        return self._pairs[index].popleft()


def _limit(limit: int | float, length: int | None) -> int | None:
    if isinstance(limit, int):
        return limit
    return int(length * limit) if length is not None and limit <= 1.0 else None
