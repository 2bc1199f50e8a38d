"""The urgent exchanges that are under way on this rank, to which others give way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# the pause between two looks at an exchange that does not tell of its end
_POLL_SECONDS = 0.5e-3
# what an exchange is given at most: the rate is measured beside pauses like these, and each makes it smaller
_LONGEST_SECONDS = 0.5
# a smaller exchange takes latency and hardly any of the link's time: the pause itself has room for it, and a rate that
# was measured on messages as small is none of the link's. Who reads between steps what a pause keeps back waits for it
_LARGE_BYTES = 64 << 10


class Urgent:
    """Knows what is under way. One thread adds, another waits, and any may tell of an end."""

    def __init__(self) -> None:
        self._exchanges: list[_Exchange] = []
        self._changed = threading.Condition()

    def add(
        self, is_done: Callable[[], bool], nbytes: int, when_done: Callable[[Callable[[], None]], object] | None = None
    ) -> None:
        """An exchange has begun.

        Args:
            is_done: Whether it has ended.
            nbytes: What this rank sends or receives in it, the larger.
            when_done: Takes what is called at its end, from any thread; at once if it has ended. None: it is looked at
                again and again, which costs a core that may be needed elsewhere.
        """
        exchange = _Exchange(is_done, nbytes, tells=when_done is not None)
        self._exchanges = [e for e in self._exchanges if not e.is_done()] + [exchange]
        if when_done is not None:
            when_done(lambda: self._ended(exchange))

    def wait(self, seconds: float, rate: float) -> None:
        """See ``give_way`` of :class:`~lightning_embrace.comm.base.Communicator`."""
        begun = time.monotonic()
        with self._changed:
            while under_way := [e for e in self._exchanges if not e.is_done()]:
                left = begun + seconds + max(_seconds(e.nbytes, rate) for e in under_way) - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left if all(e.tells for e in under_way) else _POLL_SECONDS)

    def _ended(self, exchange: _Exchange) -> None:
        with self._changed:
            exchange.ended = True
            self._changed.notify_all()


class _Exchange:
    def __init__(self, is_done: Callable[[], bool], nbytes: int, tells: bool) -> None:
        self._is_done = is_done
        self.nbytes = nbytes
        self.tells = tells
        #: it has told so; its work item may say so only a moment later
        self.ended = False

    def is_done(self) -> bool:
        return self.ended or self._is_done()


def _seconds(nbytes: int, rate: float) -> float:
    return min(_LONGEST_SECONDS, nbytes / rate) if rate > 0 and nbytes >= _LARGE_BYTES else 0.0
