"""Shards into slots of device memory and back, by one thread."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from lightning_embrace.hydra.lanes import lane_for
from lightning_embrace.hydra.layout import allocate
from lightning_embrace.hydra.ledger import BudgetError, Ledger
from lightning_embrace.hydra.shard import Shard
from lightning_embrace.hydra.store import Store
from lightning_embrace.hydra.unit import SectionName, Unit

#: what the thread does; on CUDA it may return before the device has done it
Moved = Future["torch.cuda.Event | None"]


class Slot:
    """Device memory for one shard.

    Attributes:
        memory: uint8; weights first, then optimizer states.
        shard: Whose.
        users: Runs that read it now; it stays while there are any.
        weights: The load of its weights, until somebody has waited for it.
        states: The load of its states; None where they are not there.
        used: When it was last used.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.shard: Shard | None = None
        self.users = 0
        self.weights: Moved | None = None
        self.states: Moved | None = None
        self.used = 0


class Transfer:
    """Moves shards. One thread does so, in the order in which it is asked: what is written is read back whole.

    Args:
        count: Slots: two where the next shard is loaded meanwhile.
        nbytes: Of each.
        device: Where.
        store: Where gradients go.
        ledger: The device's.
        prefetch: Whether anything is moved while the caller goes on.
    """

    def __init__(
        self, count: int, nbytes: int, device: torch.device, store: Store, ledger: Ledger, prefetch: bool
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._prefetch = prefetch
        self._taken = count * nbytes
        ledger.take("slots", self._taken)
        self._lane = lane_for(device)
        self._slots = [Slot(allocate(nbytes, device)) for _ in range(count)]
        for slot in self._slots:
            self._lane.own(slot.memory)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hydra-transfer")
        self._writes: deque[Moved] = deque()
        # what went wrong when something was written: the store is not what it should be from there on
        self._failure: BaseException | None = None
        self._clock = 0
        #: those whose gradients may be on the device, the oldest first
        self._charged: list[Shard] = []
        #: how often a shard was there, on its way, or had to be loaded when it was needed
        self.counts: Counter[str] = Counter()
        #: seconds that the thread has spent on ``"moving"``, and somebody else on ``"waiting"`` for it
        self.seconds: defaultdict[str, float] = defaultdict(float)

    # ---- loading ---------------------------------------------------------------------------------------------------

    def enter(self, shard: Shard) -> Slot:
        """Brings a shard's weights, and holds them until :meth:`leave`."""
        slot = shard.slot
        if slot is None:
            self.counts["late"] += 1
            slot = self._load(shard)
        slot.users += 1
        self._clock += 1
        slot.used = self._clock
        if slot.weights is not None:
            self.counts["foreseen" if not slot.weights.done() else "there"] += 1
            self._wait(slot.weights)
            slot.weights = None
            for unit, memory in shard.weights_in(slot.memory):
                unit.move_in(memory)
        return slot

    def leave(self, shard: Shard) -> None:
        """Its weights may go when the slot is needed."""
        assert shard.slot is not None
        shard.slot.users -= 1

    def expect(self, shard: Shard, states: bool) -> None:
        """Begins to load a shard that is likely to be needed next, if there is a slot for it."""
        if not self._prefetch:
            return
        if shard.slot is None:
            if self._free() is None:
                return
            self._load(shard)
        if states:
            self.ask_for_states(shard)

    def ask_for_states(self, shard: Shard) -> None:
        """Begins to load the optimizer's states of a shard that has a slot."""
        slot = shard.slot
        assert slot is not None
        if slot.states is None:
            portions = [(u, m) for u, m in shard.states_in(slot.memory) if m.numel()]
            slot.states = self._move(partial(_read, "states", portions))

    def states(self, shard: Shard) -> Tensor:
        """Waits for the states.

        Returns:
            The slot's memory.
        """
        self.ask_for_states(shard)
        slot = shard.slot
        assert slot is not None and slot.states is not None
        self._wait(slot.states)
        return slot.memory

    def write_back(self, shard: Shard) -> None:
        """Keeps what a step has changed. The slot may be read meanwhile; what changes it later is written later."""
        slot = shard.slot
        assert slot is not None
        self._writes.append(self._move(partial(_write, "weights", shard.weights_in(slot.memory))))
        if slot.states is not None:
            portions = [(u, m) for u, m in shard.states_in(slot.memory) if m.numel()]
            self._writes.append(self._move(partial(_write, "states", portions)))
        while self._writes and self._writes[0].done():
            self._await_write()

    # ---- gradients -------------------------------------------------------------------------------------------------

    def charge(self, shard: Shard) -> None:
        """Enters the gradients that are about to come. There is room for those of as many shards as there are slots."""
        if shard in self._charged:
            return
        while len(self._charged) >= len(self._slots):
            idle = [s for s in self._charged if s.slot is None or s.slot.users == 0]
            self.store_gradients(idle[0] if idle else self._charged[0])
        shard.charged = shard.gradient_bytes
        self._ledger.take("gradients", shard.charged)
        self._charged.append(shard)

    def discharge(self, shard: Shard) -> None:
        """They are gone."""
        self._charged.remove(shard)
        self._ledger.give("gradients", shard.charged)
        shard.charged = 0

    def store_gradients(self, shard: Shard) -> None:
        """Moves a shard's gradients to the store."""
        for unit in shard.units:
            self._wait(self._do(partial(unit.store_gradients, self._store)))
        self.discharge(shard)

    def fetch_gradients(self, shard: Shard) -> None:
        """Brings them back."""
        self.charge(shard)
        for unit in shard.units:
            if unit.needs_fetching():
                self._wait(self._do(unit.fetch_gradients))

    @contextmanager
    def gradients_of(self, shard: Shard, changed: bool) -> Iterator[None]:
        """Inside, a shard's gradients are on the device. They go back to where they were.

        Args:
            shard: The shard; its weights need not be there.
            changed: Whether they are changed meanwhile.
        """
        away = shard not in self._charged
        self.fetch_gradients(shard)
        yield
        if not away:
            return
        if changed:
            self.store_gradients(shard)
        else:
            for unit in shard.units:
                unit.put_gradients_back()
            self.discharge(shard)

    # ---- ending ----------------------------------------------------------------------------------------------------

    def wait_for(self, job: Callable[[], object]) -> None:
        """Does something in the thread, after all that was asked before."""

        def when_done() -> None:
            self._lane.finish()
            job()

        self._wait(self._do(when_done))

    def forget(self, shard: Shard) -> None:
        """Its weights are about to change in the store."""
        if shard.slot is not None:
            self._vacate(shard.slot)

    def settle(self) -> None:
        """Waits until everything is in the store."""
        while self._writes:
            self._await_write()
        self._lane.finish()
        if self._failure is not None:
            raise self._failure

    def _await_write(self) -> None:
        try:
            self._wait(self._writes.popleft())  # raises what the thread met
        except BaseException as error:
            self._failure = error
            raise

    def clear(self) -> None:
        """Empties the slots."""
        for slot in self._slots:
            slot.users = 0
            self._vacate(slot)

    def close(self) -> None:
        """Frees the slots; raises what the thread met."""
        try:
            self.settle()
            self.clear()
        finally:
            self._thread.shutdown(wait=True)
            self._lane.finish()
            self._ledger.give("slots", self._taken)
            self._taken = 0
            self._slots = []

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _free(self) -> Slot | None:
        idle = [s for s in self._slots if s.users == 0]
        return min(idle, key=lambda s: s.used, default=None)

    def _load(self, shard: Shard) -> Slot:
        slot = self._free()
        if slot is None:
            raise BudgetError(f"{shard.name}: every slot on the device is in use. Give device_memory more.")
        self._vacate(slot)
        slot.shard, shard.slot = shard, slot
        self._clock += 1
        slot.used = self._clock
        portions = shard.weights_in(slot.memory)
        slot.weights = self._move(partial(_read, "weights", portions))
        return slot

    def _vacate(self, slot: Slot) -> None:
        shard = slot.shard
        if shard is None:
            return
        if slot.weights is not None:
            self._wait(slot.weights)  # never used
            self.counts["in vain"] += 1
        if shard in self._charged:
            self.store_gradients(shard)
        for unit in shard.units:
            unit.leave()
        slot.shard = shard.slot = slot.weights = slot.states = None

    def _move(self, job: Callable[[], object]) -> Moved:
        """Copies beside computing what it is not to change meanwhile."""
        mark = self._lane.mark()
        return self._do(lambda: self._lane.run(job, mark))

    def _do(self, job: Callable[[], torch.cuda.Event | None]) -> Moved:
        def run() -> torch.cuda.Event | None:
            with _timed(self.seconds, "moving"), torch.inference_mode(False), torch.no_grad():
                return job()

        future = self._thread.submit(run)
        if not self._prefetch:
            self._wait(future)
        return future

    def _wait(self, moved: Moved) -> None:
        with _timed(self.seconds, "waiting"):
            self._lane.meet(moved.result())


@contextmanager
def _timed(seconds: defaultdict[str, float], name: str) -> Iterator[None]:
    began = perf_counter()
    try:
        yield
    finally:
        seconds[name] += perf_counter() - began


def _read(section: SectionName, portions: Sequence[tuple[Unit, Tensor]]) -> None:
    for unit, memory in portions:
        unit.read(section, memory)


def _write(section: SectionName, portions: Sequence[tuple[Unit, Tensor]]) -> None:
    for unit, memory in portions:
        unit.write(section, memory)
