"""The low-priority queue, without processes: its order, its patience, its failures and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_embrace.comm.base import Done
from lightning_embrace.comm.control import RankFailedError
from lightning_embrace.comm.fake import TwinCommunicator
from lightning_embrace.comm.queue import InlineQueue, LowPriorityQueue, Slot
from lightning_embrace.comm.torch_backend import ExchangeError

PATIENCE = 20.0  # seconds, reached only by a test that fails


class Exchange:
    """Starts when its slot is issued, ends when the test says so."""

    def __init__(
        self,
        number: int,
        issued: list[int],
        error: BaseException | None = None,
        ends: bool = True,
        alone: bool = False,
    ) -> None:
        self.slot = Slot(self._issue, f"exchange {number}", alone=alone)
        self._number, self._issued, self._error = number, issued, error
        self.end = threading.Event()
        if ends:
            self.end.set()
        self.fails_to_start = False

    def _issue(self) -> Exchange:
        self._issued.append(self._number)
        if self._error is not None and self.fails_to_start:
            raise self._error
        return self

    def wait(self) -> Tensor:
        assert self.end.wait(PATIENCE), "the test ended before the exchange"
        if self._error is not None:
            raise self._error
        return torch.tensor(self._number)

    def is_done(self) -> bool:
        return self.end.is_set()


class World:
    """A queue, what it has issued, and the exchanges."""

    def __init__(self) -> None:
        self.comm = TwinCommunicator()
        self.queue = LowPriorityQueue(self.comm)
        self.issued: list[int] = []
        self.exchanges: list[Exchange] = []

    def append(self, count: int, **options: Any) -> list[Exchange]:
        start = len(self.exchanges)
        new = [Exchange(start + k, self.issued, **options) for k in range(count)]
        self.exchanges += new
        self.queue.append([e.slot for e in new])
        return new

    def ready(self, *numbers: int) -> None:
        for number in numbers:
            self.queue.ready(self.exchanges[number].slot)

    def close(self) -> None:
        self.queue.close()
        for exchange in self.exchanges:
            exchange.end.set()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()
    assert ended(world)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def ended(world: World) -> bool:
    thread = world.queue._thread
    return eventually(lambda: thread is None or not thread.is_alive())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_in_the_order_in_which_they_were_appended(sizes: list[int], rng: Any) -> None:
    """Whatever becomes ready first: a rank's timing must not pair different exchanges of two ranks."""
    world = World()
    for size in sizes:
        world.append(size)
    order = list(range(sum(sizes)))
    rng.shuffle(order)
    world.ready(*order)
    assert [int(e.slot.wait()) for e in world.exchanges] == sorted(order) == world.issued
    assert all(e.slot.is_done() for e in world.exchanges)
    world.close()


def test_nothing_leaves_before_what_stands_in_front_of_it(world: World) -> None:
    world.append(3)
    world.ready(1, 2)
    time.sleep(0.02)
    assert world.issued == [] and not world.exchanges[1].slot.is_done()
    world.ready(0)
    world.exchanges[2].slot.wait()
    assert world.issued == [0, 1, 2]


def test_two_are_in_flight(world: World) -> None:
    """The next one is on the wire when one ends; more would keep urgent exchanges waiting."""
    world.append(4, ends=False)
    world.ready(0, 1, 2, 3)
    assert eventually(lambda: len(world.issued) == 2)
    time.sleep(0.02)
    assert world.issued == [0, 1] and not world.exchanges[0].slot.is_done()
    world.exchanges[0].end.set()
    assert eventually(lambda: len(world.issued) == 3)
    assert int(world.exchanges[0].slot.wait()) == 0


def test_what_is_alone_begins_when_those_before_it_have_ended(world: World) -> None:
    """Delayed rows beside the last chunks of an AllReduce doubled what the next forward pass waited for it."""
    before = world.append(2, ends=False)
    world.append(1, alone=True)
    world.ready(0, 1, 2)
    assert eventually(lambda: world.issued == [0, 1])
    before[0].end.set()
    before[0].slot.wait()
    time.sleep(0.02)
    assert world.issued == [0, 1]
    before[1].end.set()
    world.exchanges[2].slot.wait()
    assert world.issued == [0, 1, 2]


def test_every_slot_gives_way_for_a_bounded_time() -> None:
    """Urgent exchanges may wait for a rank that waits for this slot: the pause has an end, and each slot makes one."""
    world, paused = World(), []
    world.queue = LowPriorityQueue(world.comm, pause=0.25)
    world.comm.give_way = lambda seconds, rate: paused.append((seconds, list(world.issued)))  # type: ignore[method-assign]
    world.append(2)
    world.ready(0, 1)
    world.exchanges[1].slot.wait()
    assert paused == [(0.25, []), (0.25, [0])]
    world.close()


@pytest.mark.parametrize("fails_to_start", [True, False])
def test_a_failure_reaches_whoever_waits(world: World, fails_to_start: bool) -> None:
    """With the exchange's name; the communicator is told at once, and no later slot is issued."""
    world.append(1)
    (bad,) = world.append(1, error=ValueError("no memory"))
    bad.fails_to_start = fails_to_start
    world.append(2)
    world.ready(0, 1)
    assert int(world.exchanges[0].slot.wait()) == 0
    with pytest.raises(ExchangeError, match=r"'exchange 1' failed: ValueError: no memory") as caught:
        bad.slot.wait()
    assert isinstance(caught.value.__cause__, ValueError)
    assert world.comm.failure is caught.value
    world.ready(2, 3)
    for late in world.exchanges[2:]:
        with pytest.raises(ExchangeError, match="exchange 1"):
            late.slot.wait()
    assert world.issued == [0, 1]


def test_another_ranks_failure_keeps_its_name(world: World) -> None:
    world.append(1, error=RankFailedError(2, 7, "rows", "it was tired"))
    world.ready(0)
    with pytest.raises(RankFailedError, match="rank 2 failed at step 7"):
        world.exchanges[0].slot.wait()


def waiting(slot: Slot) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            slot.wait()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, raised


@pytest.mark.parametrize("state", ["never ready", "in flight", "behind one in flight"])
def test_close_frees_those_who_wait(world: World, state: str) -> None:
    """In every state, from any thread; what is on the wire ends by itself, here when the group is broken."""
    first, second = world.append(2, ends=False)
    if state != "never ready":
        world.ready(0)
        assert eventually(lambda: world.issued == [0])
    slot = first.slot if state == "in flight" else second.slot
    thread, raised = waiting(slot)
    world.queue.close()
    if state == "in flight":
        first.end.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert ["training has ended" in str(error) for error in raised] == [True] * (state != "in flight")
    assert world.comm.failure is None


def test_close_without_a_slot_and_twice(world: World) -> None:
    world.queue.close()
    world.queue.close()
    assert world.queue._thread is None


def test_after_close_nothing_is_issued_and_nobody_waits(world: World) -> None:
    """An exchange that was appended after the end was waited for in vain, for ever."""
    world.append(1)
    world.ready(0)
    world.exchanges[0].slot.wait()
    world.queue.close()
    (late,) = world.append(1)
    world.ready(1)
    with pytest.raises(RuntimeError, match="training has ended"):
        late.slot.wait()
    assert world.issued == [0]


def test_the_rate_of_the_wire(world: World) -> None:
    """Known from exchanges with a size alone; others have another shape on the wire."""
    world.append(1)
    world.ready(0)
    world.exchanges[0].slot.wait()
    assert world.queue.rate == 0
    (sized,) = world.append(1, ends=False)
    sized.slot.nbytes = 1000
    world.ready(1)
    time.sleep(0.01)
    sized.end.set()
    sized.slot.wait()
    assert 0 < world.queue.rate <= 1000 / 0.01


def test_two_that_share_the_wire_do_not_make_it_look_faster(world: World) -> None:
    """Regression: of two in flight the second one ended right after the first, and seemed to have taken no time; chunks
    were made as large as a wire ten times as fast would have them, and what was needed first waited behind two."""
    first, second = world.append(2, ends=False)
    for exchange in (first, second):
        exchange.slot.nbytes = 1000
    world.ready(0, 1)
    assert eventually(lambda: len(world.issued) == 2)
    time.sleep(0.05)
    second.end.set()
    first.end.set()
    second.slot.wait()
    assert 0 < world.queue.rate <= 2500 / 0.05  # the second one counts a little more


def test_inline() -> None:
    """The same order in the calling thread, and an exchange that takes place when it is waited for."""
    queue, issued = InlineQueue(), []  # type: ignore[var-annotated]
    exchanges = [Exchange(k, issued) for k in range(3)]
    queue.append([e.slot for e in exchanges])
    queue.ready(exchanges[1].slot)
    assert issued == [] and not exchanges[1].slot.is_done()
    queue.ready(exchanges[0].slot)
    assert issued == [0, 1] and exchanges[1].slot.is_done()
    assert int(exchanges[1].slot.wait()) == 1
    queue.close()
    with pytest.raises(RuntimeError, match="training has ended"):
        exchanges[2].slot.wait()


def test_it_knows_how_long_the_order_kept_it_waiting() -> None:
    """Regression: an order that changed too early left the wire idle in every step, because what was kept back was not
    counted as what could have been sent, and the ranks agreed on the same place again."""
    queue = LowPriorityQueue(TwinCommunicator())
    slots = [Slot(lambda: Done(torch.zeros(1)), name, nbytes=10) for name in ("first", "second")]
    try:
        queue.rate = 1e6
        queue.append(slots)
        time.sleep(0.05)
        assert queue.progress() == 0, "nothing was there"
        queue.ready(slots[1])
        time.sleep(0.05)
        assert queue.progress() > 1e6 * 0.01, "the wait that still goes on counts too"
        queue.ready(slots[0])
        for slot in slots:
            slot.wait()
        assert queue.progress() >= 20, "what went counts"
        queue.restart()
        assert queue.progress() == 0
    finally:
        queue.close()
