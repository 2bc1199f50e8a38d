"""When the user's optimizer is stepped on which parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_embrace.hydra.constants import made_whole
from lightning_embrace.hydra.optimizer import States, narrowed
from lightning_embrace.hydra.session import Session
from lightning_embrace.hydra.shard import Shard
from lightning_embrace.hydra.trial import states_of
from lightning_embrace.hydra.unit import StateSpec, Unit, is_away
from lightning_embrace.overlay import Overlay


class Stepper:
    """Takes an optimizer's ``step`` over.

    Args:
        optimizer: The user's.
        session: The model's.
    """

    def __init__(self, optimizer: Optimizer, session: Session) -> None:
        self._optimizer = optimizer
        self._session = session
        self._overlay = Overlay()
        self._states: dict[int, States] = {}
        self._step: Callable[..., Any] = optimizer.step
        #: some parameters have made this step and others have not
        self.torn = False

    def plan_states(self) -> int:
        """Tries the optimizer, and says the units what it keeps.

        Returns:
            Bytes that it keeps for parameters outside of blocks.

        Raises:
            CoupledOptimizerError: It cannot be stepped shard by shard.
        """
        found: dict[tuple[int, torch.dtype], list[tuple[str, torch.dtype]]] = {}

        def tried(index: int, dtype: torch.dtype) -> list[tuple[str, torch.dtype]]:
            if (index, dtype) not in found:
                found[index, dtype] = states_of(self._optimizer, self._optimizer.param_groups[index], dtype)
            return found[index, dtype]

        group_of = {id(p): i for i, g in enumerate(self._optimizer.param_groups) for p in g["params"]}
        spilled = {id(p) for unit in self._session.units for p in unit.parameters}
        for unit in self._session.units:
            specs = []
            for place, parameter in enumerate(unit.parameters):
                index = group_of.get(id(parameter))
                if index is not None and parameter.requires_grad:
                    specs += [StateSpec(place, name, dtype) for name, dtype in tried(index, parameter.dtype)]
            unit.keep_states(specs)
            unit.keeper = self._states[id(unit)] = States(unit, self._optimizer)
        return sum(
            p.numel() * dtype.itemsize
            for index, group in enumerate(self._optimizer.param_groups)
            for p in group["params"]
            if id(p) not in spilled
            for _, dtype in tried(index, p.dtype)
        )

    def install(self, in_backward: bool) -> None:
        """Takes over.

        Args:
            in_backward: A shard is stepped as soon as its gradients are complete.
        """

        def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return self.step(closure, **kwargs)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or schedulers would warn
        self._overlay.lay(self._optimizer, "step", step)
        self._session.on_complete = self._complete if in_backward else None

    def remove(self) -> None:
        """Gives it back."""
        self._session.on_complete = None
        self._overlay.remove()

    def adopt(self) -> None:
        """Takes states that were loaded, and are ordinary tensors, to where their units are."""
        for unit in self._session.units:
            if unit.place != "device" and unit.states.nbytes:
                memory = self._session.read_section(unit, "states")
                self._of(unit).settle(memory)
                self._session.transfer.wait_for(lambda u=unit, m=memory: u.write("states", m))  # type: ignore[misc]

    def make_whole(self) -> None:
        """Gives states of parameters on the device memory, where they are one number until now."""
        for parameter, states in self._optimizer.state.items():
            if not is_away(parameter) and isinstance(states, dict):
                for state in states.values():
                    if isinstance(state, Tensor):
                        made_whole(state)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, with true numbers in host memory."""
        packed = self._optimizer.state_dict()
        true: dict[int, Tensor] = {}
        for unit in self._session.units:
            if unit.place != "device" and unit.states.nbytes:
                true.update(self._of(unit).copies(self._session.read_section(unit, "states")))
        packed["state"] = {
            index: {k: true.get(id(v), v) for k, v in state.items()} if isinstance(state, dict) else state
            for index, state in packed["state"].items()
        }
        return packed

    # ---- steps -----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """What ``optimizer.step`` is: one step of all parameters that have a gradient and have not made it yet."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it
        for shard in reversed(self._session.shards):
            if not shard.stepped and shard.has_gradients():
                with self._session.present(shard, states=True):
                    self._session.transfer.fetch_gradients(shard)
                    self._step_shard(shard, **kwargs)
        spilled = {id(p) for shard in self._session.shards for p in shard.parameters}
        rest = {id(p) for g in self._optimizer.param_groups for p in g["params"]} - spilled
        with narrowed(self._optimizer, rest):
            self._step(**kwargs)
        self.torn = False
        return loss

    def _complete(self, shard: Shard) -> None:
        if shard.has_gradients():
            self._step_shard(shard)
            shard.stepped = True

    def _step_shard(self, shard: Shard, **kwargs: Any) -> None:
        """The shard is on the device, with its gradients."""
        transfer = self._session.transfer
        memory = transfer.states(shard)
        portions = [(self._of(unit), part) for unit, part in shard.states_in(memory)]
        for states, part in portions:
            states.move_in(part)
        self.torn = True
        with narrowed(self._optimizer, {id(p) for p in shard.parameters}):
            self._step(**kwargs)
        for states, part in portions:
            states.settle(part)
        for unit in shard.units:
            unit.drop_gradients()
        transfer.discharge(shard)
        transfer.write_back(shard)

    def _of(self, unit: Unit) -> States:
        return self._states[id(unit)]
