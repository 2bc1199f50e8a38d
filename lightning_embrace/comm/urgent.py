"""The urgent exchanges that are under way on this rank, to which others give way."""

from __future__ import annotations

import time
from collections.abc import Callable

# the pause between two looks
_POLL_SECONDS = 0.5e-3
# what an exchange is given at most: the rate is measured beside pauses like these, and each makes it smaller
_LONGEST_SECONDS = 0.5


class Urgent:
    """Knows what is under way. One thread adds, another waits."""

    def __init__(self) -> None:
        self._exchanges: list[tuple[Callable[[], bool], int]] = []

    def add(self, is_done: Callable[[], bool], nbytes: int) -> None:
        """An exchange has begun.

        Args:
            is_done: Whether it has ended.
            nbytes: What this rank sends or receives in it, the larger.
        """
        self._exchanges = [(done, n) for done, n in self._exchanges if not done()] + [(is_done, nbytes)]

    def wait(self, seconds: float, rate: float) -> None:
        """See ``give_way`` of :class:`~lightning_embrace.comm.base.Communicator`."""
        begun = time.monotonic()
        while True:
            waited = time.monotonic() - begun
            bounds = [seconds + _seconds(n, rate) for done, n in self._exchanges if not done()]
            if not any(waited < bound for bound in bounds):
                return
            time.sleep(_POLL_SECONDS)


def _seconds(nbytes: int, rate: float) -> float:
    return min(_LONGEST_SECONDS, nbytes / rate) if rate > 0 else 0.0
