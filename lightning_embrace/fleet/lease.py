"""The lease book: who has which device, who waits, and whom a device is granted or asked back from next.

A plain state machine: it has no clock (``now`` is an argument), sends nothing and knows no process. Whoever keeps it
tells it what happened, and carries out what is :meth:`due <LeaseBook.due>`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_embrace.fleet.policy import POLICIES, Claim, giving_way, in_turn, placed


@dataclass(frozen=True)
class Grant:
    """From now on a device is a task's.

    Attributes:
        task: Its name.
        device: The device's.
    """

    task: str
    device: str


@dataclass(frozen=True)
class Recall:
    """Others wait: a task is to give its device at its next shard boundary. It holds it until it does.

    Attributes:
        task: Its name.
        device: The device's.
    """

    task: str
    device: str


@dataclass(frozen=True)
class Lease:
    """A device was a task's for a while.

    Attributes:
        task: Its name.
        device: The device's.
        start: When it was granted. Seconds, of the clock that the book was told.
        end: When it was given, or the task had left.
    """

    task: str
    device: str
    start: float
    end: float


@dataclass
class _Member:
    """A live task.

    Attributes:
        seat: The only device that it may compute on; None: any.
        remaining: Seconds of device time that it still needs.
        unit: Seconds of its typical shard.
        told: When it said so.
        last_device: Where it computed last.
        waiting: What it claims, while it waits.
        device: What it has.
        granted: When that was granted.
        recalled: It has been asked to give it.
    """

    seat: str | None
    remaining: float
    unit: float
    told: float
    last_device: str | None
    waiting: Claim | None = None
    device: str | None = None
    granted: float = 0.0
    recalled: bool = False

    def at_boundary(self, now: float) -> float:
        """Seconds that it will still need at the shard boundary that comes next."""
        computed = now - max(self.told, self.granted)
        if self.unit > 0.0:
            computed = (math.floor(computed / self.unit) + 1) * self.unit
        return max(0.0, self.remaining - computed)


class LeaseBook:
    """Leases of devices to tasks.

    Args:
        devices: Their names.
        policy: One of :data:`~lightning_embrace.fleet.policy.POLICIES`.
        movable: Whether a task may compute on any device; else only on that of its seat.
        max_wait: Seconds after which a task goes before all others, unless the policy is ``"task"``; None: never.
        seed: Of the policy ``"random"``.

    Raises:
        ValueError: No device, one twice, or no such policy.
    """

    def __init__(
        self, devices: Sequence[str], policy: str, movable: bool = True, max_wait: float | None = None, seed: int = 0
    ) -> None:
        if not devices or len(set(devices)) != len(devices):
            raise ValueError(f"LeaseBook(devices={list(devices)}): expected one or more names, each once.")
        if policy not in POLICIES:
            raise ValueError(f"LeaseBook(policy={policy!r}): expected one of {', '.join(map(repr, POLICIES))}.")
        self.devices = tuple(devices)
        self._policy = POLICIES[policy]
        self._movable = movable
        self._max_wait = math.inf if max_wait is None else max_wait
        self._random = random.Random(seed)
        self._members: dict[str, _Member] = {}
        self._holders: dict[str, str] = {}
        #: leases that have ended, in that order
        self.leases: list[Lease] = []

    @property
    def holders(self) -> dict[str, str]:
        """The task that has it, by device."""
        return dict(self._holders)

    def running(self, now: float) -> list[Lease]:
        """Leases that have not ended, as if they did now.

        Args:
            now: Seconds.
        """
        holders = ((device, task, self._members[task].granted) for device, task in self._holders.items())
        return [Lease(task, device, granted, now) for device, task, granted in holders]

    # ---- what has happened -------------------------------------------------------------------------------------------

    def join(self, task: str, remaining: float, unit: float, device: str | None = None, *, now: float) -> None:
        """A task is live. It does not wait for a device yet.

        Args:
            task: Its name.
            remaining: Seconds of device time that it needs; ``inf``: not known.
            unit: Seconds of its typical shard; 0: not known.
            device: Of its seat. Where tasks are movable: the one that it would rather have.
            now: Seconds.

        Raises:
            ValueError: It is live already, the device is not one, or it has no seat and is not movable.
        """
        if task in self._members:
            raise ValueError(f"LeaseBook.join({task!r}): it has joined already. Let it leave first.")
        allowed: tuple[str | None, ...] = (*self.devices, None) if self._movable else self.devices
        if device not in allowed:
            raise ValueError(f"LeaseBook.join({task!r}, device={device!r}): expected one of {', '.join(self.devices)}.")
        seat = None if self._movable else device
        self._members[task] = _Member(seat, remaining, unit, now, device)

    def report(self, task: str, remaining: float, unit: float, now: float) -> None:
        """A task has measured anew how long it takes.

        Args:
            task: Its name.
            remaining: As in :meth:`join`.
            unit: As in :meth:`join`.
            now: Seconds.
        """
        member = self._member(task)
        member.remaining, member.unit, member.told = remaining, unit, now
        if (claim := member.waiting) is not None:
            member.waiting = replace(claim, remaining=remaining)

    def ask(self, task: str, now: float) -> None:
        """A task waits for a device.

        Raises:
            ValueError: It has one, or waits already.
        """
        member = self._member(task)
        if member.device is not None or member.waiting is not None:
            state = "waits already" if member.device is None else f"has {member.device}"
            raise ValueError(f"LeaseBook.ask({task!r}): it {state}. A task has one device at most.")
        member.waiting = Claim(task, member.remaining, now, now + self._max_wait, member.last_device)

    def give(self, task: str, now: float) -> None:
        """A task has a device no more. When it wants one it asks.

        Raises:
            ValueError: It has none.
        """
        member = self._member(task)
        if member.device is None:
            raise ValueError(f"LeaseBook.give({task!r}): it has no device.")
        self._end(task, member, now)

    def leave(self, task: str, now: float) -> None:
        """A task has finished or failed, and its process is gone: what it had may be granted again."""
        member = self._member(task)
        if member.device is not None:
            self._end(task, member, now)
        del self._members[task]

    def _end(self, task: str, member: _Member, now: float) -> None:
        assert member.device is not None
        self.leases.append(Lease(task, member.device, member.granted, now))
        del self._holders[member.device]
        member.last_device, member.device, member.recalled = member.device, None, False

    def _member(self, task: str) -> _Member:
        try:
            return self._members[task]
        except KeyError:
            raise ValueError(f"LeaseBook: there is no task {task!r}. It joins before anything else.") from None

    # ---- what follows ------------------------------------------------------------------------------------------------

    def due(self, now: float) -> list[Grant | Recall]:
        """What is to be done now. It counts as done: nothing is returned twice.

        Args:
            now: Seconds.

        Returns:
            Grants of free devices to tasks that wait, then those who are to give way: at most as many as wait.
        """
        if self._movable:
            return self._due_among(self._members, self.devices, now)
        actions: list[Grant | Recall] = []
        for device in self.devices:
            seated = {name: member for name, member in self._members.items() if member.seat == device}
            actions += self._due_among(seated, (device,), now)
        return actions

    def _due_among(self, members: dict[str, _Member], devices: Iterable[str], now: float) -> list[Grant | Recall]:
        """Of tasks that all may have the same devices."""
        waiting = [member.waiting for member in members.values() if member.waiting is not None]
        if not waiting:
            return []
        free = [device for device in devices if device not in self._holders]
        if free:
            self._random.shuffle(waiting)
        order = in_turn(self._policy, waiting, free, now)
        actions: list[Grant | Recall] = []
        for claim, device in placed(order[: len(free)], free):
            member = members[claim.name]
            member.waiting, member.device, member.granted = None, device, now
            self._holders[device] = claim.name
            actions.append(Grant(claim.name, device))
        holding = {name: member for name, member in members.items() if member.device is not None}
        coming = sum(member.recalled for member in holding.values())
        unserved = order[len(free) + coming :]
        holders = [
            Claim(name, member.at_boundary(now), member.granted)
            for name, member in holding.items()
            if not member.recalled
        ]
        for claim in giving_way(self._policy, holders, unserved, now):
            member = members[claim.name]
            assert member.device is not None
            member.recalled = True
            actions.append(Recall(claim.name, member.device))
        return actions
