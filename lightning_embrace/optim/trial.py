"""Optimizers tried on a small table: what they would make of a large one."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def trial_of(optimizer: Optimizer, group: dict[str, Any], *parameters: nn.Parameter) -> Optimizer:
    """An optimizer of the same kind and settings for other parameters.

    Args:
        optimizer: The optimizer.
        group: One of its parameter groups.
        parameters: What the new one trains.

    Returns:
        The new one.
    """
    settings = {k: v for k, v in group.items() if k != "params"}
    # a subclass may set what its own constructor does not take (torch's AdamW does)
    options = {k: v for k, v in settings.items() if k in inspect.signature(type(optimizer)).parameters}
    trial = type(optimizer)(parameters, **options)
    trial.param_groups[0].update(settings)
    return trial


def step(trial: Optimizer) -> None:
    """One step on the gradients that are there; some optimizers want a closure even so."""
    takes = "closure" in inspect.signature(type(trial).step).parameters
    closure: list[Any] = [lambda: torch.zeros((), dtype=torch.float64)] if takes else []
    trial.step(*closure)


def count_states(optimizer: Optimizer, group: dict[str, Any], sparse: bool) -> int:
    """How many states of its parameter's shape an optimizer keeps, seen in one step on a small table.

    Args:
        optimizer: The optimizer.
        group: One of its parameter groups.
        sparse: The table's gradient is sparse.

    Returns:
        The number.
    """
    parameter = nn.Parameter(torch.zeros(2, 3))
    grad = torch.ones(2, 3)
    parameter.grad = grad.to_sparse(1) if sparse else grad
    trial = trial_of(optimizer, group, parameter)
    step(trial)
    states = trial.state[parameter].values()
    return sum(isinstance(s, Tensor) and s.shape == parameter.shape for s in states)
