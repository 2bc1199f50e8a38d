"""A training data loader that holds one batch ahead, and otherwise is the loader it wraps."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_embrace.lookahead.ends import Ends
from lightning_embrace.lookahead.randomness import random_state


@dataclass(frozen=True)
class Terms:
    """What was agreed about a loader, equal on every rank.

    Attributes:
        length: At most this many batches an iteration; None: the loader has no length, or not on every rank.
        limit: Lightning asks for no more than this many: nothing is held beyond them.
        ahead: Hold one batch; else each is fetched when it is asked for.
    """

    length: int | None = None
    limit: int | None = None
    ahead: bool = True


@dataclass
class Item:
    """A batch that was fetched, or what came instead.

    Attributes:
        batch: The batch.
        state: The loader's state after it, where it has any.
        ended: There was no batch left.
        error: The loader raised instead.
    """

    batch: Any = None
    state: Any = None
    ended: bool = False
    error: Exception | None = None


@dataclass
class Habits:
    """What a loader was seen to do.

    Attributes:
        draws: It draws from the generators of this process for every batch, on some rank. A batch that is fetched
            before its time would then get other random numbers, and so would the model. None: not seen yet.
    """

    draws: bool | None = None


class Host(Protocol):
    """What the wrappers of one fit share."""

    def begin(self, index: int) -> None:
        """A new iteration starts."""
        ...

    def agreed(self, index: int, batches: int) -> bool:
        """Whether the held batch exists on every rank. Collective."""
        ...

    def deliver(self, index: int, batch: Any, successor: Item | None) -> None:
        """A batch is handed out; its successor is held, or it is not known."""
        ...

    def saw(self, index: int, draws: bool) -> bool:
        """Whether the loader draws random numbers on some rank. Collective for loaders without length."""
        ...


class Iteration(Iterator[Any]):
    """One iteration over a loader, for Lightning's fetcher.

    Nothing is fetched before the first batch is asked for: Lightning sets the sampler's epoch after it has made the
    iterator. And none is fetched ahead before the second of a fit was seen to draw no random numbers; the first may
    draw a seed for all of them.

    Args:
        loader: The loader.
        source: Its iterator.
        terms: What was agreed about it.
        host: The fit's.
        index: The loader's number in the fit.
        habits: What the loader was seen to do in earlier iterations.
    """

    def __init__(
        self, loader: Any, source: Iterator[Any], terms: Terms, host: Host, index: int, habits: Habits
    ) -> None:
        self.ends = Ends()
        self.delivered = 0
        #: the loader's state after the last batch that was taken; None: ask the loader
        self.state: Any = None
        #: its states after the batches that were handed out since: Lightning fetches one ahead where it knows no length
        self._untaken: deque[Any] = deque()
        self._loader, self._terms, self._host, self._index = loader, terms, host, index
        self._habits = habits
        self._source: Iterator[Any] | None = source
        self._stateful = is_stateful(loader)
        self._held: Item | None = None
        self._over = False

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        item = self._held or self._fetch_now()
        if not self._host.agreed(self._index, self.delivered):
            if item.ended and item.state is not None:
                self._end_with(item.state)
            item.ended = True  # on some rank; as the successor of the batch before, too
            self._over = True
            raise StopIteration
        if item.error is not None:
            self._over = True
            raise item.error
        self._untaken.append(item.state)
        self.delivered += 1
        self._hold(self._fetch() if self._looks_ahead() else None)
        self._host.deliver(self._index, item.batch, self._held)
        return item.batch

    def take(self) -> None:
        """The oldest batch that was handed out is trained on: whoever goes on from here goes on behind it."""
        if self._untaken:
            self.state = self._untaken.popleft()

    def drop(self) -> None:
        """The iteration was abandoned: gives free what it holds."""
        self._over = True
        self._source = self._held = None

    def go_on(self, before: Iteration) -> None:
        """The source is an iterator and goes on where it was: what is held of it must not be lost."""
        if before._held is not None and not before._held.ended:
            self._hold(before._held)
            self.state = before.state

    def forget_state(self) -> None:
        """The loader was reset, its own state is the true one."""
        self.state, self._stateful = None, False
        self._untaken.clear()

    def _end_with(self, state: Any) -> None:
        """The last batch was the last one."""
        if self._untaken:
            self._untaken[-1] = state
        else:
            self.state = state

    def _looks_ahead(self) -> bool:
        limits = (n for n in (self._terms.limit, self._terms.length) if n is not None)
        return self._terms.ahead and self._habits.draws is False and all(self.delivered < n for n in limits)

    def _hold(self, item: Item | None) -> None:
        self._held = item
        self.ends.hold(None if item is None else not item.ended)

    def _fetch_now(self) -> Item:
        if self.state is None:
            self.state = self._state_now()
        watched = self._terms.ahead and self._habits.draws is None and self.delivered > 0
        before = random_state() if watched else None
        item = self._fetch()
        if watched:
            self._habits.draws = self._host.saw(self._index, random_state() != before)
        self._hold(item)
        return item

    def _fetch(self) -> Item:
        length = self._terms.length
        if length is None or self.delivered < length:
            return self._fetch_from_source()
        # asked beyond the length, as in a CombinedLoader: a loader that has come to its end is to notice it
        if length_of(self._loader) == length and (item := self._fetch_from_source()).ended:
            return item
        return Item(ended=True)

    def _fetch_from_source(self) -> Item:
        assert self._source is not None
        try:
            return Item(next(self._source), self._state_now())
        except StopIteration:
            return Item(ended=True, state=self._state_now())
        except Exception as error:
            return Item(error=error)

    def _state_now(self) -> Any:
        # a copy: what the loader returned may be the object that it changes with the next batch
        return deepcopy(self._loader.state_dict()) if self._stateful else None


class LookaheadLoader(Iterable[Any]):
    """A loader that holds one batch ahead while Lightning's training loop iterates over it.

    Whoever else iterates over it (a callback that reads `trainer.train_dataloader` on one rank, say) iterates over the
    loader itself: what the ranks tell each other belongs to the training loop. Attributes are the loader's own, for
    reading and for setting.

    Use :func:`wrap` to make one.
    """

    _wrapping: Wrapping

    def __init__(self, wrapping: Wrapping) -> None:
        object.__setattr__(self, "_wrapping", wrapping)

    def __iter__(self) -> Iterator[Any]:
        if not _asked_by_training_loop():
            return iter(self._wrapping.loader)
        return self._wrapping.iterate()

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapping":  # being copied or unpickled: there is no loader yet
            raise AttributeError(name)
        return getattr(self._wrapping.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapping.loader, name, value)
        if name == "_iterator" and self._wrapping.iteration is not None:  # so Lightning shuts a loader down
            self._wrapping.iteration.forget_state()

    def __delattr__(self, name: str) -> None:
        delattr(self._wrapping.loader, name)

    def __repr__(self) -> str:
        return f"LookaheadLoader({self._wrapping.loader!r})"


class Wrapping:
    """What a wrapper keeps apart from the attributes of its loader.

    Args:
        loader: The wrapped loader.
        terms: What was agreed about it.
        host: The fit's.
        index: The loader's number in the fit.
    """

    def __init__(self, loader: Any, terms: Terms, host: Host, index: int) -> None:
        self.loader, self.terms, self.host, self.index = loader, terms, host, index
        self.iteration: Iteration | None = None
        self.habits = Habits()
        #: the fit is over, or has other loaders now: the wrapper is nothing but its loader
        self.closed = False

    def iterate(self) -> Iterator[Any]:
        """Starts an iteration over; the one before is abandoned."""
        if self.closed:
            return iter(self.loader)
        self.host.begin(self.index)
        source = iter(self.loader)
        iteration = Iteration(self.loader, source, self.terms, self.host, self.index, self.habits)
        if self.iteration is not None:
            if source is self.loader:
                iteration.go_on(self.iteration)
            self.iteration.drop()
        self.iteration = iteration
        return iteration

    def close(self) -> None:
        """Drops what is held; the state is still the one after the last batch that was taken."""
        self.closed = True
        if self.iteration is not None:
            self.iteration.drop()


class _Sized(LookaheadLoader):
    def __len__(self) -> int:
        assert self._wrapping.terms.length is not None
        return self._wrapping.terms.length


class _Stateful(LookaheadLoader):
    def state_dict(self) -> Any:
        iteration = self._wrapping.iteration
        if iteration is not None and iteration.state is not None:
            return iteration.state
        return self._wrapping.loader.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        if self._wrapping.iteration is not None:
            self._wrapping.iteration.drop()
            self._wrapping.iteration = None
        self._wrapping.loader.load_state_dict(state_dict)


class _SizedStateful(_Sized, _Stateful):
    pass


def wrap(loader: Any, terms: Terms, host: Host, index: int) -> LookaheadLoader:
    """Wraps a loader. The result has a length and a state only if Lightning is to see one.

    Args:
        loader: The loader, or an earlier wrapper of it.
        terms: What was agreed about it; without ``length`` the wrapper has no length.
        host: The fit's.
        index: The loader's number in the fit.

    Returns:
        The wrapper.
    """
    loader = unwrap(loader)
    classes = {
        (False, False): LookaheadLoader,
        (False, True): _Stateful,
        (True, False): _Sized,
        (True, True): _SizedStateful,
    }
    return classes[terms.length is not None, is_stateful(loader)](Wrapping(loader, terms, host, index))


def unwrap(loader: Any) -> Any:
    """The loader itself: Lightning leaves the wrappers of one fit in a user's CombinedLoader, for the next to find."""
    return loader._wrapping.loader if isinstance(loader, LookaheadLoader) else loader


def is_stateful(loader: Any) -> bool:
    """What Lightning saves in checkpoints."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def length_of(loader: Any) -> int | None:
    """The loader's length, None where it has none."""
    try:
        return len(unwrap(loader))
    except (TypeError, NotImplementedError):
        return None


def _asked_by_training_loop() -> bool:
    """Whether `__iter__` was called by Lightning's CombinedLoader, through which its loops iterate."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).endswith(".utilities.combined_loader")
