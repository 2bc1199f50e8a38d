"""The user's optimizer, and what it keeps, for some parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_embrace.hydra.unit import StateSpec, Unit, stand_in


@contextmanager
def narrowed(optimizer: Optimizer, parameters: Collection[int]) -> Iterator[None]:
    """Inside, the optimizer's groups have these parameters alone; the groups themselves stay the same objects.

    Args:
        optimizer: The optimizer.
        parameters: ``id`` of each.
    """
    whole = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in parameters]
    try:
        yield
    finally:
        for group, parameters_of_group in zip(optimizer.param_groups, whole):
            group["params"] = parameters_of_group


class States:
    """What an optimizer keeps for a unit's parameters, in the store between steps.

    A state keeps its identity as its parameter does, with NaN for data while it is away.

    Args:
        unit: The unit.
        specs: What is kept.
        optimizer: The optimizer.
    """

    def __init__(self, unit: Unit, specs: Sequence[StateSpec], optimizer: Optimizer) -> None:
        self._unit = unit
        self._specs = tuple(specs)
        self._optimizer = optimizer
        self._stand_ins = [
            stand_in(torch.empty((), dtype=s.dtype).expand(unit.parameters[s.parameter].shape), unit.device)
            for s in self._specs
        ]

    def move_in(self, memory: Tensor) -> None:
        """Makes states that exist read from memory that holds the section ``states``."""
        for state, nothing, view in self._existing(memory):
            if not _shares(state, nothing) and not _shares(state, view):
                view.copy_(state.data)  # made since, or loaded from a checkpoint
            state.data = view

    def will_make_some(self) -> bool:
        """Whether a step will make states, which are then beside the section."""
        parameters = [self._unit.parameters[spec.parameter] for spec in self._specs]
        return any(p.grad is not None and self._find(spec) is None for p, spec in zip(parameters, self._specs))

    def settle(self, memory: Tensor) -> None:
        """After a step: what it has made is put into the section, and everything is NaN from here on."""
        self.collect(memory)
        self.leave()

    def any_exist(self) -> bool:
        """See :class:`~lightning_embrace.hydra.unit.KeepsStates`."""
        return any(self._find(spec) is not None for spec in self._specs)

    def collect(self, memory: Tensor) -> None:
        """See :class:`~lightning_embrace.hydra.unit.KeepsStates`."""
        for state, nothing, view in self._existing(memory):
            if not _shares(state, view) and not _shares(state, nothing):
                view.copy_(state.data)

    def restore(self, memory: Tensor, make: Callable[[Tensor], Tensor]) -> None:
        """See :class:`~lightning_embrace.hydra.unit.KeepsStates`."""
        for state, nothing, view in self._existing(memory):
            if _shares(state, nothing):
                state.data = make(view)

    def away(self) -> Iterator[tuple[int, Tensor]]:
        """The states whose numbers are in the store, with their places in the section."""
        for index, (spec, nothing) in enumerate(zip(self._specs, self._stand_ins)):
            state = self._find(spec)
            if state is not None and _shares(state, nothing):
                yield index, state

    def take_out(self, states: Mapping[Any, dict[str, Any]], numbers: Mapping[int, int]) -> dict[int, Tensor]:
        """Takes what belongs into the section out of states that are to be loaded, and leaves NaN there.

        Args:
            states: By the parameters' numbers; changed.
            numbers: By ``id`` of parameters.

        Returns:
            By place in the section what was there.
        """
        taken = {}
        for index, (spec, nothing) in enumerate(zip(self._specs, self._stand_ins)):
            state = states.get(numbers[id(self._unit.parameters[spec.parameter])])
            value = state.get(spec.key) if isinstance(state, dict) else None
            if isinstance(value, Tensor) and state is not None and value.shape == nothing.shape:
                taken[index], state[spec.key] = value, nothing
        return taken

    def leave(self) -> None:
        """See :class:`~lightning_embrace.hydra.unit.KeepsStates`."""
        for spec, nothing in zip(self._specs, self._stand_ins):
            state = self._find(spec)
            if state is not None:
                state.data = nothing

    def _existing(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        views = self._unit.states.views(memory)
        for spec, nothing, view in zip(self._specs, self._stand_ins, views):
            state = self._find(spec)
            if state is not None:
                yield state, nothing, view

    def _find(self, spec: StateSpec) -> Tensor | None:
        state = self._optimizer.state.get(self._unit.parameters[spec.parameter])
        found = None if state is None else state.get(spec.key)
        return found if isinstance(found, Tensor) else None


def _shares(left: Tensor, right: Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.device == right.device
