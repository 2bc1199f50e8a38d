"""The lease book under all policies, whatever happens in whatever order."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_embrace.fleet.lease import Grant, LeaseBook
from lightning_embrace.fleet.policy import POLICIES

POLICY = st.sampled_from(list(POLICIES))
SECONDS = st.one_of(st.just(math.inf), st.floats(0, 9), st.integers(0, 3).map(float))


class AnyHistory(RuleBasedStateMachine):
    """Tasks join, ask, give and leave as they like; what the book says is entered in a second, simpler book."""

    @initialize(
        devices=st.integers(1, 4),
        policy=POLICY,
        movable=st.booleans(),
        max_wait=st.sampled_from([None, 0.0, 2.0]),
    )
    def begin(self, devices: int, policy: str, movable: bool, max_wait: float | None) -> None:
        self.devices = [f"d{index}" for index in range(devices)]
        self.policy, self.movable = policy, movable
        self.book = LeaseBook(self.devices, policy, movable=movable, max_wait=max_wait)
        self.now, self.joined = 0.0, 0
        self.seats: dict[str, str] = {}
        self.waiting: set[str] = set()
        self.holders: dict[str, str] = {}  # devices by task
        self.recalled: set[str] = set()

    @rule(seat=st.integers(0, 3), remaining=SECONDS, unit=SECONDS.filter(math.isfinite))
    def join(self, seat: int, remaining: float, unit: float) -> None:
        name, self.joined = f"t{self.joined}", self.joined + 1
        self.seats[name] = self.devices[seat % len(self.devices)]
        self.book.join(name, remaining, unit, self.seats[name], now=self.now)

    @precondition(lambda self: self.seats.keys() - self.waiting - self.holders.keys())
    @rule(at_once=st.booleans())
    def ask(self, at_once: bool) -> None:
        """All that could; the book decides at once, or when more has happened in this moment."""
        for task in sorted(self.seats.keys() - self.waiting - self.holders.keys()):
            self.waiting.add(task)
            self.book.ask(task, self.now)
        if at_once:
            self.due()

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.holders)))
        del self.holders[task]
        self.recalled.discard(task)
        self.book.give(task, self.now)

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Of whoever it is: one that holds, waits, was just recalled, or does neither."""
        task = data.draw(st.sampled_from(sorted(self.seats)))
        del self.seats[task]
        self.holders.pop(task, None)
        self.waiting.discard(task)
        self.recalled.discard(task)
        self.book.leave(task, self.now)

    @precondition(lambda self: self.seats)
    @rule(data=st.data(), remaining=SECONDS, unit=SECONDS.filter(math.isfinite))
    def report(self, data: st.DataObject, remaining: float, unit: float) -> None:
        self.book.report(data.draw(st.sampled_from(sorted(self.seats))), remaining, unit, self.now)

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def due(self) -> None:
        for action in self.book.due(self.now):
            if isinstance(action, Grant):
                assert action.task in self.waiting, "granted to who has not asked"
                assert action.device not in self.holders.values(), "two holders of one device"
                assert action.task not in self.holders, "one holder of two devices"
                assert self.movable or action.device == self.seats[action.task], "moved"
                self.waiting.remove(action.task)
                self.holders[action.task] = action.device
            else:
                assert self.holders.get(action.task) == action.device, "recalled from who does not have it"
                assert action.task not in self.recalled, "recalled twice"
                assert self.policy != "task", "a whole model was asked to give way"
                self.recalled.add(action.task)
        free = set(self.devices) - set(self.holders.values())
        assert not any(self.movable or self.seats[task] in free for task in self.waiting if free), "idle, and wanted"
        assert self.book.due(self.now) == [], "the same again"

    @invariant()
    def no_two_leases_overlap(self) -> None:
        if not hasattr(self, "book"):
            return
        assert self.book.holders == {device: task for task, device in self.holders.items()}
        leases = sorted(self.book.leases, key=lambda lease: (lease.start, lease.end))
        for key in ("device", "task"):
            for name in {getattr(lease, key) for lease in leases}:
                own = [lease for lease in leases if getattr(lease, key) == name]
                assert all(one.end <= following.start for one, following in pairwise(own))


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@given(
    st.lists(SECONDS, min_size=1, max_size=6).flatmap(
        lambda all_: st.tuples(st.just(all_), st.permutations(range(len(all_))))
    ),
    st.integers(1, 3),
    st.sampled_from(["lrtf", "fifo", "task"]),
)
def test_the_order_within_a_moment_does_not_matter(
    tasks: tuple[list[float], list[int]], devices: int, policy: str
) -> None:
    """Sockets are read in any order: what was said at one moment leads to the same grants and recalls."""
    remaining, shuffled = tasks

    def history(order: list[int]) -> list[object]:
        book = LeaseBook([f"d{index}" for index in range(devices)], policy)
        for index in order:
            book.join(f"t{index}", remaining[index], 1.0, now=0.0)
            book.ask(f"t{index}", 0.0)
        actions: list[object] = [book.due(0.0)]
        for index in order:
            if f"t{index}" in book.holders.values():
                book.give(f"t{index}", 1.0)
                book.ask(f"t{index}", 1.0)
        return [*actions, book.due(1.0)]

    assert history(sorted(shuffled)) == history(shuffled)
