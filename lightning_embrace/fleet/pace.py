"""How fast a task computes, and how long it is still going to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

#: how much of the typical shard is the last one
_NEWEST = 0.05


@dataclass(frozen=True)
class Progress:
    """How far a task is.

    Attributes:
        step: Of the optimizer.
        loss: Of the last batch, or None.
        remaining: Seconds of computing that are left; ``inf``: not known.
        unit: Seconds that a typical shard computes; 0: not known.
        longest: Seconds that the longest one did.
    """

    step: int = 0
    loss: float | None = None
    remaining: float = math.inf
    unit: float = 0.0
    longest: float = 0.0


class Pace:
    """Measures the time between boundaries while a task has a device.

    Args:
        clock: Gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._computed = 0.0
        self._batches = 0
        # the first batch is measured shard by shard, and tells little of the others
        self._first = 0.0
        #: seconds that shards compute
        self.unit = 0.0
        self.longest = 0.0

    def go_on(self) -> None:
        """Computing begins, or goes on."""
        if self._since is None:
            self._since = self._clock()

    def boundary(self) -> None:
        """A shard is over."""
        if self._since is None:
            return
        now = self._clock()
        span, self._since = now - self._since, now
        self._computed += span
        self.longest = max(self.longest, span)
        self.unit = span if self.unit == 0.0 else (1.0 - _NEWEST) * self.unit + _NEWEST * span

    def pause(self) -> None:
        """Computing ends for a while."""
        self.boundary()
        self._since = None

    def batch_over(self) -> None:
        """A training batch is over, with all that has been computed since the last one."""
        self._batches += 1
        if self._batches == 1:
            self._first = self._computed

    def remaining(self, batches: float) -> float:
        """Seconds of computing.

        Args:
            batches: That are still to be trained on; ``inf``: not known.
        """
        if self._batches == 0 or math.isinf(batches):
            return math.inf
        if self._batches == 1:
            return self._first * batches
        return (self._computed - self._first) / (self._batches - 1) * batches
