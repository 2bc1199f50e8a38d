"""An optimizer tried on a few numbers: whether it treats parameters one by one, and what it keeps for each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_embrace.hydra.live import Live
from lightning_embrace.hydra.optimizer import narrowed
from lightning_embrace.optim.trial import step, trial_of

_STEPS = 3
_SHAPE = (3, 2)


class Temporaries(NamedTuple):
    """What a step takes beside parameters, gradients and states, as multiples of parameters.

    Attributes:
        first: For a parameter by itself.
        second: What another one adds: what the one before has taken may be freed only when this one has its own.
        others: What every other adds, where all are stepped at once.
    """

    first: float
    second: float
    others: float

    def nbytes(self, size: int, together: int) -> int:
        """Bytes where a parameter of a size is the largest of those that are stepped together."""
        second = min(size, max(0, together - size))
        return int(self.first * size + self.second * second + self.others * max(0, together - 2 * size))


class CoupledOptimizerError(ValueError):
    """An optimizer whose step on some parameters depends on others."""


def states_of(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> list[tuple[str, torch.dtype]]:
    """Steps a copy of the optimizer on four tiny parameters, and another one on two at a time.

    Args:
        optimizer: The optimizer.
        group: One of its parameter groups.
        dtype: Of some of the group's parameters.

    Returns:
        Name and dtype of what it keeps for a parameter in the parameter's shape.

    Raises:
        CoupledOptimizerError: The results differ, or it cannot be tried.
    """
    name = type(optimizer).__qualname__
    try:
        whole, ours = (_tried(optimizer, group, dtype, parts) for parts in (1, 2))
    except Exception as error:
        raise CoupledOptimizerError(
            f"HydraStrategy: {name} could not be tried on four small parameters ({error!r}), so it is not known whether"
            " it can be stepped shard by shard. Take one of torch.optim that treats each element by itself, such as"
            " AdamW or SGD."
        ) from error
    if _numbers(whole) != _numbers(ours):
        raise CoupledOptimizerError(
            f"HydraStrategy: {name} moves a parameter otherwise when it is stepped with some parameters at a time: its"
            " steps depend on all of them together, and they are never on the device together. Take one of torch.optim"
            " that treats each element by itself, such as AdamW or SGD."
        )
    states = whole.state[whole.param_groups[0]["params"][0]]
    return [(k, v.dtype) for k, v in states.items() if isinstance(v, Tensor) and tuple(v.shape) == _SHAPE]


def temporaries_of(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> Temporaries:
    """Steps a copy of the optimizer on one, two and four tiny parameters, and sees what that takes.

    Args:
        optimizer: The optimizer; it was tried by :func:`states_of`.
        group: One of its parameter groups.
        dtype: Of some of the group's parameters.
        device: Where it steps: on CUDA torch's optimizers take all parameters at once.
    """
    trial = _tried(optimizer, group, dtype, 1, device)
    parameters = trial.param_groups[0]["params"]
    size = parameters[0].nbytes
    peaks = []
    for count in (1, 2, 4):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with narrowed(trial, {id(p) for p in parameters[:count]}), Live(least=size) as live:
            step(trial)
        peaks.append(live.peak / size)
    one, two, four = peaks
    return Temporaries(one, two - one, (four - two) / 2)


def _tried(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, parts: int, device: torch.device | None = None
) -> Optimizer:
    if not isinstance(group.get("lr"), Tensor) and not group.get("lr", 1.0):
        group = {**group, "lr": 0.1}  # a warm-up begins at zero, and then nothing would be seen
    numbers = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(_SHAPE, generator=numbers, dtype=torch.float64).to(device=device, dtype=dtype)

    parameters = [nn.Parameter(draw()) for _ in range(4)]
    trial = trial_of(optimizer, group, *parameters)
    for _ in range(_STEPS):
        for parameter in parameters:
            parameter.grad = draw()
        for part in range(parts):
            with narrowed(trial, {id(p) for p in parameters[part::parts]}):
                step(trial)
    return trial


def _numbers(trial: Optimizer) -> list[object]:
    """All that steps have changed, comparable."""
    found: list[object] = []
    for group in trial.param_groups:
        found += [(key, _plain(value)) for key, value in group.items() if key != "params"]
        for parameter in group["params"]:
            found.append(_plain(parameter))
            found += [(key, _plain(value)) for key, value in trial.state[parameter].items()]
    return found


def _plain(value: Any) -> object:
    return value.detach().double().tolist() if isinstance(value, Tensor) else value
