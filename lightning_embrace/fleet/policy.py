"""Whose turn it is: pure functions over what tasks claim. Knows no clock, no devices' state and no processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

#: compares; the smaller one is first
Key = tuple[float | str, ...]


@dataclass(frozen=True)
class Claim:
    """A task that waits for a device, or that has one.

    Attributes:
        name: The task's.
        remaining: Seconds of device time that it still needs; of one that has a device, at its next shard boundary.
            ``inf``: not known.
        since: Since when it has waited, or had its device. Seconds.
        late: From when on it has waited for too long.
        last_device: Where it computed last.
    """

    name: str
    remaining: float
    since: float
    late: float = math.inf
    last_device: str | None = None


@dataclass(frozen=True)
class Policy:
    """Three decisions.

    Attributes:
        precedence: Given who waits and which devices are free: who goes first.
        retirement: Given who has a device: who gives way first.
        gives_way: Given who has a device and who waits: whether it is to change hands at the next shard boundary.
        bounds_waiting: Whether ``max_wait`` has a say.
    """

    precedence: Callable[[Claim, Collection[str]], Key]
    retirement: Callable[[Claim], Key]
    gives_way: Callable[[Claim, Claim], bool]
    bounds_waiting: bool = True


def _longest_first(waiting: Claim, free: Collection[str]) -> Key:
    """Of equal ones whoever was last on a free device; those of unknown length take turns instead."""
    away = math.isfinite(waiting.remaining) and waiting.last_device not in free
    return -waiting.remaining, away, waiting.since, waiting.name


def _shortest_first(holder: Claim) -> Key:
    return holder.remaining, holder.since, holder.name


def _waits_for_longer(holder: Claim, waiting: Claim) -> bool:
    """Tasks of unknown length take turns: nothing says which of them is longer."""
    return waiting.remaining > holder.remaining or math.isinf(waiting.remaining)


def _earliest_first(waiting: Claim, free: Collection[str]) -> Key:
    return waiting.since, waiting.name


def _as_they_come(waiting: Claim, free: Collection[str]) -> Key:
    return ()


def _held_longest_first(holder: Claim) -> Key:
    return holder.since, holder.name


def _always(holder: Claim, waiting: Claim) -> bool:
    return True


def _never(holder: Claim, waiting: Claim) -> bool:
    return False


#: by the name that a user gives
POLICIES: Mapping[str, Policy] = {
    # Sharded-LRTF: the longest remaining time first. Ties: whoever was last on a free device, then the longest waiting.
    "lrtf": Policy(_longest_first, _shortest_first, _waits_for_longer),
    # round robin, shard by shard
    "fifo": Policy(_earliest_first, _held_longest_first, _always),
    # at each boundary any of those that could go on
    "random": Policy(_as_they_come, _held_longest_first, _always),
    # whole models, the longest first: nobody gives way before it has finished
    "task": Policy(_longest_first, _shortest_first, _never, bounds_waiting=False),
}


def in_turn(policy: Policy, waiting: Sequence[Claim], free: Collection[str], now: float) -> list[Claim]:
    """Who goes first: those who have waited for too long, the longest waiting first, then as the policy says.

    Args:
        policy: Decides.
        waiting: Tasks that all may have the same devices, in an order that is random.
        free: Devices that nobody has.
        now: Seconds.

    Returns:
        All of ``waiting``, in order.
    """

    def key(claim: Claim) -> tuple[bool, Key]:
        if is_late(policy, claim, now):
            return False, _earliest_first(claim, free)
        return True, policy.precedence(claim, free)

    return sorted(waiting, key=key)


def is_late(policy: Policy, waiting: Claim, now: float) -> bool:
    """Whether a task has waited for too long, and the policy minds."""
    return policy.bounds_waiting and waiting.late <= now


def placed(winners: Sequence[Claim], free: Sequence[str]) -> list[tuple[Claim, str]]:
    """Gives each its last device where that is free, and the others what is left.

    Args:
        winners: Tasks, at most as many as devices, those with the first choice first.
        free: Devices that nobody has.

    Returns:
        Tasks and devices.
    """
    left = dict.fromkeys(free)
    devices: dict[str, str] = {}
    for claim in winners:
        if claim.last_device is not None and claim.last_device in left:
            devices[claim.name] = claim.last_device
            del left[claim.last_device]
    rest = iter(left)
    return [(claim, devices.get(claim.name) or next(rest)) for claim in winners]


def giving_way(policy: Policy, holders: Sequence[Claim], waiting: Sequence[Claim], now: float) -> list[Claim]:
    """Who is to give its device away at its next shard boundary.

    Args:
        policy: Decides.
        holders: Tasks that have a device and have not been asked yet.
        waiting: Tasks for which none is on its way, in turn.
        now: Seconds.

    Returns:
        Some of ``holders``, at most as many as ``waiting``.
    """
    pairs = zip(sorted(holders, key=policy.retirement), waiting)
    return [holder for holder, w in pairs if is_late(policy, w, now) or policy.gives_way(holder, w)]
