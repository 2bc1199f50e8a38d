"""What lives while a model is spilled; knows no Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lightning_embrace.hydra.building import into_memory
from lightning_embrace.hydra.call import Call
from lightning_embrace.hydra.layout import allocate, copy_all
from lightning_embrace.hydra.leaving import maker_for
from lightning_embrace.hydra.ledger import Ledger
from lightning_embrace.hydra.order import Order
from lightning_embrace.hydra.outside import Outside
from lightning_embrace.hydra.partition import Partition
from lightning_embrace.hydra.pilot import Pilot
from lightning_embrace.hydra.plan import Plan
from lightning_embrace.hydra.shard import Shard
from lightning_embrace.hydra.state_dicts import StateDicts
from lightning_embrace.hydra.store import Store
from lightning_embrace.hydra.stored import Stored
from lightning_embrace.hydra.tape import Block
from lightning_embrace.hydra.transfer import Transfer
from lightning_embrace.hydra.unit import KeepsStates, SectionName, StateSpec, Unit
from lightning_embrace.overlay import Overlay

#: a shard, and whether its states are needed as well
_Visit = tuple[int, bool]
#: on whose account what is always on the device is
_RESIDENT = "blocks that stay, what is outside of blocks, activations"


class Session:
    """A model whose blocks take turns on the device.

    Args:
        partition: The model in parts.
        device: Where it runs.
        ledgers: The accounts of ``"device"`` and ``"host"``.
        store: Where shards wait.
        prefetch: Whether a shard is loaded while the one before it computes.
    """

    def __init__(
        self, partition: Partition, device: torch.device, ledgers: dict[str, Ledger], store: Store, prefetch: bool
    ) -> None:
        self.partition = partition
        self.device = device
        self.ledgers = ledgers
        self.store = store
        self.units = _units_of(partition, device)
        #: what waits in the store, in parts that move together
        self.shards: list[Shard] = []
        self.blocks = [Block(b.name, b.module, b.parameters[0], self, device) for b in partition.blocks]
        #: called when the last backward through a shard is done
        self.on_complete: Callable[[Shard], None] | None = None
        #: called before another shard computes, or a block that stays: whoever shares the device may wait here
        self.at_boundary: Callable[[], None] | None = None
        #: measures the step, where it is the first one
        self.pilot: Pilot | None = None
        self._prefetch = prefetch
        self._transfer: Transfer | None = None
        self._overlay = Overlay()
        self._unit_of = {id(p): unit for unit in self.units for p in unit.parameters}
        self._shard_of: dict[Unit, Shard] = {}
        self._orders: dict[str, Order[_Visit]] = {}
        self._order: Order[_Visit] = Order()
        self._resident = 0
        # calls on the tape in this step, and in the one before
        self._taped = self._taped_before = 0
        # bytes that may be kept of calls, more than there are now, of units that the plan says; and of any unit's calls
        self._rooms: dict[Unit, int] = {}
        self._activations: dict[Unit, int] = {}
        self._kept: set[Call] = set()
        self._last: Call | None = None
        self._computing: Shard | None = None
        # the backward of a training step is under way; somebody has gone back before, and may do so again
        self._stepping = self._went_back_early = False
        modules = {id(m): m for b in partition.blocks for m in b.module.modules()}
        self.state_dicts = StateDicts(list(modules.values()), self.read, self.write)
        for block in self.blocks:
            self._overlay.lay(block.module, "_compiled_call_impl", block)
        self._outside = Outside(self.blocks, self.units, self._overlay)

    @property
    def transfer(self) -> Transfer:
        """What moves shards."""
        assert self._transfer is not None
        return self._transfer

    # ---- places ----------------------------------------------------------------------------------------------------

    def park(self) -> None:
        """Moves all units off the device, before it is known where they will be."""
        for unit in self.units:
            fits = self.ledgers["host"].fits(unit.weights.nbytes)
            unit.take_place("host" if fits or not self.store.has_disk else "disk", self.store)

    def apply(self, plan: Plan) -> None:
        """Moves units to where a plan has them; between steps.

        Args:
            plan: Of ``self.units``.

        Raises:
            OSError: The disk has no room for it. Nothing was moved.
        """
        self.store.check_disk(plan.disk_bytes)
        self._let_go()
        self._close_transfer()
        order = {"disk": 0, "host": 1, "device": 2}  # room is made before it is taken
        for unit, place in sorted(zip(self.units, plan.places), key=lambda pair: order[pair[1]]):
            unit.take_place(place, self.store)
        staying = [p for unit in self.units if unit.place == "device" for p in unit.parameters]
        for parameter in (*staying, *self.partition.glue):
            into_memory(parameter)
        self.shards = [Shard(n, [self.units[i] for i in indices]) for n, indices in enumerate(plan.shards)]
        self._shard_of = {unit: shard for shard in self.shards for unit in shard.units}
        self._orders.clear()
        self._activations = dict(zip(self.units, plan.activations))
        self._rooms = {unit: n for unit, n, kept in zip(self.units, plan.activations, plan.kept) if kept}
        for block in self.blocks:
            unit = self._unit_of_block(block)
            block.kept = unit.place == "device" and plan.kept[self.units.index(unit)]
        device = self.ledgers["device"]
        device.give(_RESIDENT, self._resident)
        self._resident = plan.device_bytes - plan.slots * (plan.slot_bytes + plan.gradient_bytes)
        device.take(_RESIDENT, self._resident)
        self._outside.watch()
        if self.shards:
            self._transfer = Transfer(
                plan.slots, plan.slot_bytes, self.device, self.store, device, self._prefetch and plan.slots > 1
            )

    def release(self) -> None:
        """Gives the blocks' calls back, and makes the parameters ordinary ones in host memory."""
        self._let_go()
        self._overlay.remove()
        self._outside.remove()
        self.state_dicts.remove()
        try:
            self._close_transfer()
        finally:
            budget = self.ledgers["host"].limit
            if budget is not None and self.device.type == "cpu":
                budget += self.ledgers["device"].limit or 0
            make = maker_for(self.units, self.store.folder, budget)
            for unit in reversed(self.units):  # the store's file is cut off from its end
                unit.take_place("device", self.store, make)
                unit.forget_gradients()
            self.store.close()

    def _close_transfer(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
        self._transfer = None

    def settle(self) -> None:
        """Waits until the store has what steps have changed; raises what went wrong meanwhile."""
        if self._transfer is not None:
            self._transfer.settle()

    def keep_states(self, unit: Unit, specs: Sequence[StateSpec], keeper: KeepsStates) -> None:
        """Says a unit what the optimizer keeps; between steps, and before a new plan."""
        shard = self._shard_of.get(unit)
        if shard is not None:
            self._let_go()
            self.settle()
            self.transfer.forget(shard)
        unit.keep_states(specs, keeper, self.store)

    def expect_backward(self, stepping: bool) -> None:
        """What comes now is the backward after a training step, in which shards may be stepped; or it is over."""
        self._stepping = stepping

    # ---- numbers ---------------------------------------------------------------------------------------------------

    def find(self, parameter: nn.Parameter) -> Stored | None:
        """Where a parameter's numbers are; None if it never leaves the device."""
        unit = self._unit_of.get(id(parameter))
        if unit is None or unit.place == "device":
            return None
        return Stored(unit, "weights", next(i for i, p in enumerate(unit.parameters) if p is parameter))

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        """A copy of a parameter's numbers in host memory, wherever they are; None if it never leaves the device."""
        stored = self.find(parameter)
        return None if stored is None else stored.read(self.transfer)

    def overwrite(self, unit: Unit, section: SectionName, memory: Tensor) -> None:
        """Puts something in the place of what the store has of a unit."""
        self._let_go()
        self.transfer.forget(self._shard_of[unit])
        self.transfer.wait_for(partial(unit.write, section, memory))

    def write(self, parameters: Sequence[nn.Parameter]) -> None:
        """Takes the numbers that parameters have now into the store, and makes them NaN."""
        self._let_go()
        changed: dict[Unit, set[int]] = {}
        for parameter in parameters:
            unit = self._unit_of.get(id(parameter))
            if unit is not None and unit.place != "device":
                changed.setdefault(unit, set()).add(id(parameter))
        for unit, chosen in changed.items():
            memory = allocate(unit.weights.nbytes)
            self.transfer.wait_for(partial(unit.read, "weights", memory))
            views = unit.weights.views(memory)
            pairs = [(p.data, v) for p, v in zip(unit.parameters, views) if id(p) in chosen]
            copy_all([p for p, _ in pairs], [v for _, v in pairs])
            self.overwrite(unit, "weights", memory)
            unit.leave()

    # ---- steps -----------------------------------------------------------------------------------------------------

    def begin(self, what: str) -> None:
        """A step of some kind begins; those of a kind visit shards in the same order."""
        self._let_go()
        self._order = self._orders.setdefault(what, Order())
        self._order.begin()
        if self._taped:
            self._taped_before = self._taped
        self._taped = 0
        self._stepping = self._went_back_early = False
        for shard in self.shards:
            shard.pending = 0
            shard.stepped = False

    @contextmanager
    def present(self, shard: Shard, states: bool) -> Iterator[None]:
        """Inside, a shard is on the device, and the next one is on its way.

        Args:
            shard: The shard.
            states: Its optimizer states will be needed too.
        """
        if shard is not self._computing:
            self._pass(shard)
        transfer = self.transfer
        transfer.enter(shard)
        try:
            if states:
                transfer.ask_for_states(shard)
            following = self._order.visit((shard.index, states))
            if following is not None:
                transfer.expect(self.shards[following[0]], following[1])
            yield
        finally:
            transfer.leave(shard)

    @contextmanager
    def forward_of(self, block: Block) -> Iterator[None]:
        """See :class:`~lightning_embrace.hydra.tape.Keeper`."""
        shard = self._shard_with(block)
        if shard is None:
            self._pass(None)
            yield
            return
        with self.present(shard, states=False):
            yield

    @contextmanager
    def backward_of(self, call: Call, tensors: Sequence[Tensor]) -> Iterator[None]:
        """See :class:`~lightning_embrace.hydra.tape.Keeper`."""
        block = call.block
        shard = self._shard_with(block)
        if self._last is not None and self._last is not call:
            self._last.let_go()  # what it takes is needed now
        with ExitStack() as stack:
            if shard is not None:
                self._went_back_early |= not self._stepping
                stack.enter_context(self.present(shard, states=self.on_complete is not None))
                self.transfer.fetch_gradients(shard)
            else:
                self._pass(None)
            if self.pilot is not None:
                stack.enter_context(self.pilot.inside(block.name, block.parameters, tensors))
            yield
            if shard is not None:
                shard.pending -= 1
                if shard.pending == 0 and self.on_complete is not None and not self._went_back_early:
                    self.on_complete(shard)

    def _pass(self, shard: Shard | None) -> None:
        self._computing = shard
        if self.at_boundary is not None:
            self.at_boundary()

    def moves(self, tensor: Tensor) -> bool:
        """See :class:`~lightning_embrace.hydra.tape.Keeper`."""
        unit = self._unit_of.get(id(tensor))
        return unit is not None and unit.place != "device"

    def room(self, block: Block) -> int | None:
        """See :class:`~lightning_embrace.hydra.tape.Keeper`."""
        if self.pilot is not None:
            return None
        unit = self._unit_of_block(block)
        if self._taped + 1 == self._taped_before:  # its backward is likely to come at once: computing has room for it
            return self._activations[unit]
        return self._rooms.get(unit)

    def kept(self, call: Call) -> None:
        """See :class:`~lightning_embrace.hydra.tape.Keeper`."""
        unit = self._unit_of_block(call.block)
        if self._rooms.get(unit, -1) < call.kept_bytes:
            self._last = call
        else:
            self._rooms[unit] -= call.kept_bytes
        self._kept.add(call)

    def released(self, call: Call) -> None:
        """See :class:`~lightning_embrace.hydra.tape.Keeper`."""
        self._kept.remove(call)
        if self._last is call:
            self._last = None
        else:
            self._rooms[self._unit_of_block(call.block)] += call.kept_bytes

    def _let_go(self) -> None:
        for call in list(self._kept):
            call.let_go()

    def taped(self, block: Block, tensors: Sequence[Tensor]) -> None:
        """See :class:`~lightning_embrace.hydra.tape.Keeper`."""
        self._taped += 1
        shard = self._shard_with(block)
        if shard is not None:
            shard.pending += 1
        if self.pilot is not None:
            self.pilot.called(block.name, tensors)

    def over_gradients(
        self, parameters: Sequence[nn.Parameter], work: Callable[[set[int]], None], changed: bool
    ) -> None:
        """Brings gradients to the device part by part.

        Args:
            parameters: Whose.
            work: Is given the ``id`` of those whose gradients are there; each is among them once.
            changed: Whether it changes them.
        """
        wanted = {id(p) for p in parameters}
        spilled: set[int] = set()
        for shard in self.shards:
            here = {id(p) for p in shard.parameters} & wanted
            spilled |= here
            if here and shard.has_gradients():
                with self.transfer.gradients_of(shard, changed):
                    work(here)
        work(wanted - spilled)

    def _shard_with(self, block: Block) -> Shard | None:
        """None: it stays on the device."""
        return self._shard_of.get(self._unit_of_block(block))

    def _unit_of_block(self, block: Block) -> Unit:
        return self._unit_of[id(block.own)]


def _units_of(partition: Partition, device: torch.device) -> list[Unit]:
    """One for each block, or for several that share parameters."""
    made = []
    for indices in partition.units:
        blocks = [partition.blocks[i] for i in indices]
        parameters = {id(p): p for block in blocks for p in block.parameters}
        made.append(Unit(" & ".join(b.name for b in blocks), list(parameters.values()), device))
    return made
