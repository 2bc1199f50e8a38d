"""A fleet on a clock that only counts: the lease book of real fleets, and tasks that are lists of shard times."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_embrace.fleet.lease import Grant, Lease, LeaseBook

#: given the shard times of a task and how many shards are done: seconds that remain and seconds of its typical shard,
#: as a task would tell them
Estimate = Callable[[Sequence[float], int], tuple[float, float]]


@dataclass(frozen=True)
class Simulation:
    """What has happened.

    Attributes:
        leases: Who had which device when, in the order in which they ended. Seconds since the beginning.
        makespan: When the last task was over. Seconds.
    """

    leases: list[Lease]
    makespan: float


def exact(shards: Sequence[float], done: int) -> tuple[float, float]:
    """Tasks know what is to come."""
    return sum(shards[done:]), shards[done] if done < len(shards) else 0.0


def measured(shards: Sequence[float], done: int) -> tuple[float, float]:
    """Tasks know how many shards are to come, and how long those took that are done: before the first one, nothing."""
    if done == 0:
        return float("inf"), 0.0
    mean = sum(shards[:done]) / done
    return mean * (len(shards) - done), mean


def simulate(
    tasks: Sequence[Sequence[float]],
    devices: int,
    policy: str = "lrtf",
    *,
    max_live: int | None = None,
    max_wait: float | None = None,
    seed: int = 0,
    estimate: Estimate = exact,
) -> Simulation:
    """Lets tasks alternate on devices. Moving shards takes no time, and neither does anything else but shards.

    Args:
        tasks: For each task the seconds of its shards, in the order in which it computes them.
        devices: How many.
        policy: As for :class:`~lightning_embrace.fleet.lease.LeaseBook`.
        max_live: How many tasks are live at a time; the others join in their order. None: all.
        max_wait: As for the book.
        seed: As for the book.
        estimate: What a task tells about itself.
    """
    names = [f"d{index}" for index in range(devices)]
    book = LeaseBook(names, policy, movable=True, max_wait=max_wait, seed=seed)
    return _Run(tasks, book, max_live or len(tasks), max_wait, estimate).run()


class _Run:
    """A simulation at work."""

    def __init__(
        self,
        tasks: Sequence[Sequence[float]],
        book: LeaseBook,
        seats: int,
        max_wait: float | None,
        estimate: Estimate,
    ) -> None:
        self._shards = {f"t{index}": shards for index, shards in enumerate(tasks)}
        self._book = book
        self._seats = seats
        self._max_wait = max_wait
        self._estimate = estimate
        self._to_come = deque(self._shards)
        self._done = dict.fromkeys(self._shards, 0)
        self._recalled: set[str] = set()
        #: when a shard ends, and whose; "": somebody may have waited for too long
        self._moments: list[tuple[float, str]] = []

    def run(self) -> Simulation:
        """Until all tasks are over."""
        self._turn(0.0)
        while self._moments:
            now = self._moments[0][0]
            while self._moments and self._moments[0][0] == now:
                _, task = heapq.heappop(self._moments)
                if task:
                    self._end_shard(task, now)
            self._turn(now)
        leases = self._book.leases
        return Simulation(leases, max((lease.end for lease in leases), default=0.0))

    def _turn(self, now: float) -> None:
        while self._seats and self._to_come:
            task = self._to_come.popleft()
            self._seats -= 1
            remaining, unit = self._estimate(self._shards[task], 0)
            self._book.join(task, remaining, unit, now=now)
            self._ask(task, now)
        for action in self._book.due(now):
            if isinstance(action, Grant):
                self._begin_shard(action.task, now)
            else:
                self._recalled.add(action.task)

    def _begin_shard(self, task: str, now: float) -> None:
        heapq.heappush(self._moments, (now + self._shards[task][self._done[task]], task))

    def _end_shard(self, task: str, now: float) -> None:
        self._done[task] += 1
        if self._done[task] == len(self._shards[task]):
            self._recalled.discard(task)
            self._book.leave(task, now)
            self._seats += 1
            return
        remaining, unit = self._estimate(self._shards[task], self._done[task])
        self._book.report(task, remaining, unit, now)
        if task in self._recalled:
            self._recalled.remove(task)
            self._book.give(task, now)
            self._ask(task, now)
        else:
            self._begin_shard(task, now)

    def _ask(self, task: str, now: float) -> None:
        self._book.ask(task, now)
        if self._max_wait is not None:
            heapq.heappush(self._moments, (now + self._max_wait, ""))
