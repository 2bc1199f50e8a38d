"""One step of one parameter applied later than its optimizer's, or in several parts, with the numbers of one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_embrace.optim.rows import without_hooks


@dataclass(frozen=True)
class Settings:
    """A parameter group's settings as they were at a step: a scheduler changes them before a late part is applied.

    Args:
        values: All but the parameters; tensors are copies.
    """

    values: Mapping[str, Any]


def snapshot(optimizer: Optimizer, parameter: Tensor) -> Settings:
    """Copies the settings of a parameter's group. Call it when the optimizer steps.

    Args:
        optimizer: The optimizer.
        parameter: One of its parameters.

    Returns:
        The settings for :func:`apply_late`.
    """
    for group in optimizer.param_groups:
        if any(p is parameter for p in group["params"]):
            return snapshot_group(group)
    raise ValueError(f"The parameter of shape {tuple(parameter.shape)} is in no group of {type(optimizer).__name__}.")


def snapshot_group(group: Mapping[str, Any]) -> Settings:
    """Copies the settings of a parameter group, for all its parameters at once.

    Args:
        group: One of an optimizer's ``param_groups``.

    Returns:
        The settings for :func:`apply_late`.
    """
    return Settings({key: _copy(value) for key, value in group.items() if key not in ("params", "param_names")})


def apply_late(optimizer: Optimizer, parameter: Tensor, grad: Tensor, settings: Settings, *, counted: bool) -> None:
    """Runs the optimizer's own step on one parameter, later than the optimizer stepped.

    The state is that of ``optimizer.state[parameter]``. No hook runs, and neither schedulers nor profilers see a step.
    ``parameter.grad`` is left as it is.

    Where a part of a dense gradient comes late (see :func:`lightning_embrace.optim.split.splits`), it is given as a
    sparse gradient all the same, and the part before it holds zeros in its rows. torch's formulas for sparse
    gradients round in another order: such rows agree with the whole dense step to float rounding, not bit by bit.

    Args:
        optimizer: A class for which :func:`~lightning_embrace.optim.split.may_defer` has no objection.
        parameter: The parameter.
        grad: The gradient, or the late part of its rows.
        settings: The :func:`snapshot` taken when the optimizer stepped.
        counted: Whether the optimizer's step has counted this step already: its first part, if only of zero rows, was
            in ``parameter.grad`` then. Else ``parameter.grad`` was None, and this is the only part.
    """
    known = parameter in optimizer.state
    state = optimizer.state[parameter]
    seen = _uncounted(optimizer, state) if counted else state
    _step_alone(optimizer, parameter, grad, settings, seen)
    if counted:
        state.update({key: value for key, value in seen.items() if key != "step"})
    if not known and not state:  # SGD without momentum has no state, and its state dict shows none
        del optimizer.state[parameter]


def _step_alone(
    optimizer: Optimizer, parameter: Tensor, grad: Tensor, settings: Settings, state: dict[str, Any]
) -> None:
    """Steps an optimizer of the same class that has this parameter only, and no hooks."""
    kind = type(optimizer)
    alone = kind.__new__(kind)
    alone.__setstate__(
        {
            "defaults": dict(optimizer.defaults),
            "state": defaultdict(dict),
            "param_groups": [{**settings.values, "params": [parameter]}],
        }
    )
    alone.state[parameter] = state
    kept, parameter.grad = parameter.grad, grad
    try:
        without_hooks(kind.step)(alone)
    finally:
        parameter.grad = kept


def _uncounted(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The same state one step back, for a step that counts itself again."""
    assert "step" in state or isinstance(optimizer, torch.optim.SGD), "the first part goes through optimizer.step()"
    return {key: value - 1 if key == "step" else value for key, value in state.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(_copy(v) for v in value)
    return value
