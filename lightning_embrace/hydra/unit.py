"""The least that is moved: a block, or several that share parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_embrace.hydra.layout import Section, Shape, allocate, copy_all, lay_out
from lightning_embrace.hydra.packing import write_packed
from lightning_embrace.hydra.plan import Place
from lightning_embrace.hydra.store import Extent, Store, Tier

SectionName = Literal["weights", "states"]
_SECTIONS: tuple[SectionName, ...] = ("weights", "states")


class StateSpec(NamedTuple):
    """A tensor that an optimizer keeps for a parameter, of the parameter's shape.

    Attributes:
        parameter: Its place in the unit.
        key: Its name in ``optimizer.state[parameter]``.
        dtype: Of its elements.
    """

    parameter: int
    key: str
    dtype: torch.dtype


class KeepsStates(Protocol):
    """What knows the optimizer's states for a unit."""

    def any_exist(self) -> bool:
        """Whether the optimizer has made any yet."""

    def collect(self, memory: Tensor) -> None:
        """Copies the states that are ordinary tensors into memory that holds the section ``states``."""

    def restore(self, memory: Tensor, make: Callable[[Tensor], Tensor]) -> None:
        """Makes the states ordinary tensors, each of them a copy that ``make`` makes of a view of memory."""

    def leave(self) -> None:
        """Makes the states NaN."""


class Unit:
    """Parameters with their place.

    A parameter keeps its identity wherever its numbers are. While they are away its data is one NaN, expanded to its
    shape: shape, dtype and device hold, reading shows NaN, writing raises.

    Args:
        name: For people.
        parameters: Each once.
        device: Where they are used.
    """

    def __init__(self, name: str, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self.name = name
        self.parameters = tuple(parameters)
        self.device = device
        #: where it lives between its turns; on the device it always is
        self.place: Place = "device"
        self.weights: Section = lay_out(Shape.of(p) for p in self.parameters)
        self.state_specs: tuple[StateSpec, ...] = ()
        self.states: Section = lay_out(())
        self.keeper: KeepsStates | None = None
        self._stand_ins = [stand_in(p, device) for p in self.parameters]
        self._gradient_stand_ins = [stand_in(p, device) for p in self.parameters]
        self._stored_gradients: set[int] = set()
        self._extents: dict[str, Extent] = {}

    def keep_states(self, specs: Sequence[StateSpec], keeper: KeepsStates, store: Store) -> None:
        """Says what the optimizer keeps, at first or anew.

        Args:
            specs: Its tensors.
            keeper: Knows them.
            store: Where there will be room for them, if the unit is there.
        """
        if self.place != "device" and self.keeper is not None and self.keeper.any_exist():
            self.keeper.restore(self._whole("states", allocate(self.states.nbytes)), torch.clone)
        self.state_specs = tuple(specs)
        self.states = lay_out(Shape.of(self.parameters[s.parameter].data, s.dtype) for s in specs)
        self.keeper = keeper
        if self.place != "device":
            self._make_room_for_states(keeper, store)

    def _make_room_for_states(self, keeper: KeepsStates, store: Store) -> None:
        assert self.place != "device"
        before = self._extents.pop("states", None)
        if before is not None:
            before.close()
        if self.states.nbytes:
            extent = self._extents["states"] = store.reserve(self.states.nbytes, self.place)
            if keeper.any_exist():
                memory = extent.memory()
                keeper.collect(memory)
                extent.write(memory)
                keeper.leave()

    def take_place(self, place: Place, store: Store, make: Callable[[Tensor], Tensor] | None = None) -> None:
        """Moves parameters, states and gradients for good.

        Args:
            place: Where to.
            store: Host memory and disk.
            make: Makes the tensors, if the place is the device, as copies; None: on the unit's own device.
        """
        if place == self.place:
            return
        self._bring(self._in_store())
        if place == "device":
            self._come_to_stay(make or self._copy)
        else:
            self._go(place, store)

    def _come_to_stay(self, make: Callable[[Tensor], Tensor]) -> None:
        """One section after the other: this takes memory beside what ``make`` makes."""
        memory = self._whole("weights", allocate(self.weights.nbytes))
        for parameter, view in zip(self.parameters, self.weights.views(memory)):
            parameter.data = make(view)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(parameter.device)
        del memory, view
        if self.keeper is not None and self.keeper.any_exist():
            self.keeper.restore(self._whole("states", allocate(self.states.nbytes)), make)
        self.close()
        self.place = "device"

    def _go(self, place: Tier, store: Store) -> None:
        extents: dict[str, Extent] = {}
        for name in _SECTIONS:
            if self.section(name).nbytes:
                extents[name] = extent = store.reserve(self.section(name).nbytes, place)
                if name == "weights" or (self.keeper is not None and self.keeper.any_exist()):
                    extent.write(self._whole(name, extent.memory()))
        self.close()
        self.place = place
        self._extents.update(extents)
        self.leave()
        if self.keeper is not None:
            self.keeper.leave()
        self.store_gradients(store)

    def _copy(self, view: Tensor) -> Tensor:
        return view.to(self.device, copy=True)

    def _whole(self, name: SectionName, memory: Tensor) -> Tensor:
        """Puts a section into memory of its length, from wherever it is."""
        if self.place != "device":
            self._extents[name].read(memory)
        elif name == "weights":
            copy_all([p.data for p in self.parameters], self.weights.views(memory))
        elif self.keeper is not None:
            self.keeper.collect(memory)
        return memory

    # ---- weights ---------------------------------------------------------------------------------------------------

    def move_in(self, memory: Tensor) -> None:
        """Makes the parameters read from memory that holds the section ``weights``."""
        for nothing in self._stand_ins:
            if nothing.device.type == "cpu" and nothing.is_floating_point() and not nothing.flatten()[:1].isnan().all():
                raise ValueError(
                    f"HydraStrategy: something was written to parameters of {self.name!r} while they were away, and is"
                    " lost. Load numbers with load_state_dict() of the module, which takes them to the store."
                )
        for parameter, view in zip(self.parameters, self.weights.views(memory)):
            parameter.data = view

    def leave(self) -> None:
        """Makes the parameters NaN."""
        for parameter, nothing in zip(self.parameters, self._stand_ins):
            parameter.data = nothing

    # ---- gradients -------------------------------------------------------------------------------------------------

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients that there can be."""
        return sum(p.numel() * p.element_size() for p in self.parameters if p.requires_grad)

    def live_gradients(self) -> list[int]:
        """The places of the parameters whose gradients are on the device."""
        pairs = zip(self.parameters, self._gradient_stand_ins)
        return [i for i, (p, nothing) in enumerate(pairs) if p.grad is not None and p.grad is not nothing]

    def has_gradients(self) -> bool:
        """Whether there are any, on the device or in the store."""
        self._check_gradients()
        return bool(self.live_gradients() or self._in_store())

    def store_gradients(self, store: Store) -> None:
        """Moves the gradients that are on the device to the store."""
        live = self.live_gradients()
        if not live:
            return
        extent = self._extents.get("gradients")
        if extent is None:
            assert self.place != "device"
            extent = self._extents["gradients"] = store.reserve(self.weights.nbytes, self.place)
        gradients = {index: gradient for index in live if (gradient := self.parameters[index].grad) is not None}
        if any(gradient.is_sparse for gradient in gradients.values()):
            raise ValueError(
                f"{self.name}: a sparse gradient cannot be spilled. Build its embedding with sparse=False, or"
                " leave it outside of the blocks (HydraStrategy(blocks=['!name', ...]))."
            )
        write_packed(gradients, self.weights, extent, keep=bool(self._in_store()), device=self.device)
        for index in live:
            self.parameters[index].grad = self._gradient_stand_ins[index]
            self._stored_gradients.add(index)

    def put_gradients_back(self) -> None:
        """After :meth:`fetch_gradients`, where they were only read: the store still has them."""
        for index in self.live_gradients():
            self.parameters[index].grad = self._gradient_stand_ins[index]
            self._stored_gradients.add(index)

    def needs_fetching(self) -> bool:
        """Whether any reads as NaN."""
        return any(p.grad is nothing for p, nothing in zip(self.parameters, self._gradient_stand_ins))

    def fetch_gradients(self) -> None:
        """Brings those back that were stored and not zeroed since.

        Raises:
            RuntimeError: A step has used them, and they were not zeroed.
        """
        self._check_gradients()
        wanted = self._in_store()
        used = [p for p, nothing in zip(self.parameters, self._gradient_stand_ins) if p.grad is nothing]
        if len(used) > len(wanted):
            raise RuntimeError(
                f"{self.name}: more gradients were to be added to those that the last optimizer step has used. Call"
                " zero_grad() between an optimizer's step and the next backward."
            )
        self._bring(wanted)

    def _check_gradients(self) -> None:
        if any(nothing._version for nothing in self._gradient_stand_ins):
            raise ValueError(
                f"HydraStrategy: something was written to gradients of {self.name!r} while they were in the store, and"
                " is lost. Call zero_grad(), which frees them, in the place of zero_grad(set_to_none=False)."
            )

    def _bring(self, wanted: Sequence[int]) -> None:
        self._stored_gradients.clear()
        if not wanted:
            return
        memory = allocate(self.weights.nbytes, self.device)
        self._extents["gradients"].read(memory)
        views = self.weights.views(memory)
        for index in wanted:
            self.parameters[index].grad = views[index]

    def forget_gradients(self) -> None:
        """Makes those that read as NaN None."""
        for parameter, nothing in zip(self.parameters, self._gradient_stand_ins):
            if parameter.grad is nothing:
                parameter.grad = None

    def drop_gradients(self, used: Collection[int]) -> None:
        """Frees gradients after a step.

        Args:
            used: ``id`` of parameters that the optimizer has. Their gradients read as NaN until it zeroes them; nobody
                would zero, or use, others.
        """
        self._stored_gradients.clear()
        for parameter, nothing in zip(self.parameters, self._gradient_stand_ins):
            if parameter.grad is not None:
                parameter.grad = nothing if id(parameter) in used else None

    def _in_store(self) -> list[int]:
        """The places of the parameters whose gradients were stored and not zeroed since."""
        return [i for i in sorted(self._stored_gradients) if self.parameters[i].grad is self._gradient_stand_ins[i]]

    # ---- moving ----------------------------------------------------------------------------------------------------

    def read(self, section: SectionName, into: Tensor, start: int = 0) -> None:
        """Fills memory with ``"weights"`` or ``"states"`` from the store, from a page on."""
        self._extents[section].read(into, start)

    def section(self, name: SectionName) -> Section:
        """Where the tensors of one lie."""
        return self.weights if name == "weights" else self.states

    def write(self, section: SectionName, source: Tensor) -> None:
        """Keeps them in the store."""
        self._extents[section].write(source)

    def close(self) -> None:
        """Gives the store's pages back."""
        for extent in self._extents.values():
            extent.close()
        self._extents.clear()


def is_away(tensor: Tensor) -> bool:
    """Whether a parameter's data, or a state of it, is one number, expanded."""
    return tensor.numel() > 1 and not any(tensor.stride())


def stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    """One NaN of a tensor's shape and dtype; zero where there is no NaN."""
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)
