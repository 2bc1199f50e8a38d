"""When the user's optimizer is stepped on which parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_embrace.checkpoint.mapped import unmapped
from lightning_embrace.checkpoint.optimizer_names import unpacked_state
from lightning_embrace.checkpoint.sharded import read_rest
from lightning_embrace.hydra.constants import made_whole
from lightning_embrace.hydra.layout import allocate
from lightning_embrace.hydra.loading import check_kept, read_into
from lightning_embrace.hydra.optimizer import States, narrowed
from lightning_embrace.hydra.session import Session
from lightning_embrace.hydra.shard import Shard
from lightning_embrace.hydra.step_hooks import after_step, before_step, without_step_hooks
from lightning_embrace.hydra.stored import Stored
from lightning_embrace.hydra.trial import states_of, temporaries_of
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
        self._trained: list[list[bool]] = []
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
            specs, kept = [], {spec.parameter for spec in unit.state_specs}  # those that were trained until now
            for place, parameter in enumerate(unit.parameters):
                index = group_of.get(id(parameter))
                if index is not None and (parameter.requires_grad or place in kept):
                    specs += [StateSpec(place, name, dtype) for name, dtype in tried(index, parameter.dtype)]
            if id(unit) not in self._states or tuple(specs) != unit.state_specs:
                self._states[id(unit)] = States(unit, specs, self._optimizer)
                self._session.keep_states(unit, specs, self._states[id(unit)])
        self._trained = self._what_is_trained()
        return sum(
            p.numel() * dtype.itemsize
            for index, group in enumerate(self._optimizer.param_groups)
            for p in group["params"]
            if id(p) not in spilled
            for _, dtype in tried(index, p.dtype)
        )

    def temporaries(self) -> int:
        """Bytes that a step takes beside parameters, gradients and states: parts of the model are stepped in turn."""
        together = max((unit.gradient_bytes for unit in self._session.units), default=0)
        device = torch.device("cpu") if self._session.device.type == "meta" else self._session.device
        most = 0
        for group in self._optimizer.param_groups:
            sizes = {(p.dtype, _nbytes(p)) for p in group["params"] if p.requires_grad}
            taken = {dtype: temporaries_of(self._optimizer, group, dtype, device) for dtype in {d for d, _ in sizes}}
            most = max([most, *(taken[dtype].nbytes(size, together) for dtype, size in sizes)])
        return most

    def has_changed(self) -> bool:
        """Whether other parameters are trained than those that were planned for: some were frozen, thawed or added."""
        return self._trained != self._what_is_trained()

    def _what_is_trained(self) -> list[list[bool]]:
        return [[p.requires_grad for p in group["params"]] for group in self._optimizer.param_groups]

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

    def make_whole(self) -> None:
        """Gives states of parameters on the device memory, where they are one number until now."""
        for parameter, states in self._optimizer.state.items():
            if not is_away(parameter) and isinstance(states, dict):
                for state in states.values():
                    if isinstance(state, Tensor):
                        made_whole(state)

    def state_dict(self, leave: Callable[[Stored], Tensor] | None = None) -> dict[str, Any]:
        """The optimizer's, with true numbers in host memory.

        Args:
            leave: Gives something in the place of each tensor that is in the store.
        """
        packed = self._optimizer.state_dict()
        leave = leave or (lambda stored: stored.read(self._session.transfer))
        given = {
            id(state): leave(Stored(unit, "states", index))
            for unit in self._session.units
            if unit.place != "device"
            for index, state in self._of(unit).away()
        }
        packed["state"] = {
            number: {k: given.get(id(v), v) for k, v in state.items()} if isinstance(state, dict) else state
            # in the parameters' order, in which plain training makes them; what belongs to none comes last
            for number, state in sorted(packed["state"].items(), key=_number)
        }
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any], done: Callable[[Tensor], None] | None = None) -> None:
        """Loads a state dict. What belongs into the store goes there unit by unit.

        Args:
            state_dict: The optimizer's. It is not changed, and nothing keeps its tensors: they may be mapped, or still
                in a folder.
            done: Called with each tensor that has been copied into the store.

        Raises:
            ValueError: It has states of another kind than those that were planned.
        """
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        numbers = {id(p): number for number, p in enumerate(parameters)}
        states = {n: dict(s) if isinstance(s, Mapping) else s for n, s in state_dict.get("state", {}).items()}
        away = [unit for unit in self._session.units if unit.place != "device" and unit.state_specs]
        taken = [self._of(unit).take_out(states, numbers) for unit in away]
        check_kept(self._optimizer, states, [numbers[id(p)] for u in away for p in u.parameters if id(p) in numbers])
        rest = unpacked_state({**state_dict, "state": read_rest(states, lambda *_: None)})
        self._optimizer.load_state_dict({**rest, "state": unmapped(rest["state"], is_away)})
        for unit, values in zip(away, taken):
            if values:
                memory = allocate(unit.states.nbytes)
                views = unit.states.views(memory)
                read_into({index: views[index] for index in values}, values)
                self._session.overwrite(unit, "states", memory)
                del memory, views
            if done is not None:
                for value in values.values():
                    done(value)
            self._of(unit).leave()

    # ---- steps -----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """What ``optimizer.step`` is: one step of all parameters that have a gradient and have not made it yet."""
        kwargs = before_step(self._optimizer, {"closure": closure, **kwargs})
        loss, closure = None, kwargs.pop("closure")
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
        for part in self._parts(rest):
            self._step_some(part, **kwargs)
        self.torn = False
        after_step(self._optimizer, kwargs)
        self._session.expect_backward(stepping=False)
        return loss

    def _parts(self, rest: set[int]) -> list[set[int]]:
        """What stays on the device, in parts that are stepped one by one where memory is short."""
        if not self._session.shards:
            return [rest]
        self.torn = True
        units = [u for u in self._session.units if u.place == "device"]
        staying = [{id(p) for p in unit.parameters} & rest for unit in units]
        return [*staying, rest.difference(*staying)]

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
        if any(states.will_make_some() for states, _ in portions):
            for parameter in shard.parameters:  # what it makes is in its place before the next one's is made
                self._step_some({id(parameter)}, **kwargs)
                for states, part in portions:
                    states.move_in(part)
        else:
            self._step_some({id(p) for p in shard.parameters}, **kwargs)
        for states, part in portions:
            states.settle(part)
        used = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        for unit in shard.units:
            unit.drop_gradients(used)
        transfer.discharge(shard)
        transfer.write_back(shard)

    def _step_some(self, parameters: Collection[int], **kwargs: Any) -> None:
        with narrowed(self._optimizer, parameters), without_step_hooks(self._optimizer):
            self._step(**kwargs)

    def _of(self, unit: Unit) -> States:
        return self._states[id(unit)]


def _nbytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _number(pair: tuple[Any, Any]) -> tuple[int, int]:
    return (0, pair[0]) if isinstance(pair[0], int) else (1, 0)
