"""Which gradients may arrive in parts, and which steps may wait: pure decisions about optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_embrace.optim.adagrad import Adagrad
from lightning_embrace.optim.kinds import ELEMENTWISE, ROW_SPARSE
from lightning_embrace.optim.rows import name_of
from lightning_embrace.optim.sgd import SGD

_SGD = (torch.optim.SGD, SGD)
_ADAGRAD = (torch.optim.Adagrad, Adagrad)
_COMPILED = ("fused", "capturable", "differentiable")


def splits(optimizer: Optimizer, group: dict[str, Any], sparse: bool) -> str | None:
    """Whether a table's gradient may be applied in parts, some rows now and others later.

    A step may be split where a row without gradient keeps its weight and its state, and where the optimizer takes the
    late rows as a sparse gradient.

    Args:
        optimizer: The optimizer that trains the table.
        group: The table's parameter group.
        sparse: Whether the table has sparse gradients.

    Returns:
        None where it may, else the reason in a few words.
    """
    for setting in _COMPILED:
        if group.get(setting):
            return f"{setting}={group[setting]} takes no sparse gradient"
    return _moves_all_rows(optimizer, group, sparse)


def touches_all_rows(optimizer: Optimizer, group: dict[str, Any], sparse: bool) -> bool:
    """Whether a step may move rows of a table that got no gradient.

    Args:
        optimizer: The optimizer that trains the table.
        group: The table's parameter group.
        sparse: Whether the table has sparse gradients.

    Returns:
        False only where it is known that such rows keep weight and state.
    """
    return _moves_all_rows(optimizer, group, sparse) is not None


def may_defer(optimizer: Optimizer, known_hooks: int = 0) -> str | None:
    """Whether parameters may be stepped one by one, after the optimizer's own step.

    Coupling between parameters cannot be seen: only classes known to have none are admitted.

    Args:
        optimizer: The optimizer.
        known_hooks: Number of its step hooks that are the caller's own.

    Returns:
        None where they may, else the reason in a few words.
    """
    if type(optimizer) not in ELEMENTWISE:
        return f"{type(optimizer).__qualname__} may couple its parameters"
    for group in optimizer.param_groups:
        for setting in _COMPILED:
            if group.get(setting):
                return f"{name_of(optimizer)} has {setting}={group[setting]}"
    hooks = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    if hooks > known_hooks:
        return f"{name_of(optimizer)} has step hooks"
    if torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks:
        return "there are step hooks for all optimizers"
    own = vars(optimizer).get("step")  # learning rate schedulers count steps this way
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return f"the step of {name_of(optimizer)} was replaced"
    return None


def _moves_all_rows(optimizer: Optimizer, group: dict[str, Any], sparse: bool) -> str | None:
    """Why a row without gradient may lose its weight or its state."""
    kind, name = type(optimizer), name_of(optimizer)
    if sparse and kind in ROW_SPARSE | {torch.optim.SparseAdam}:
        return None
    if kind in _SGD and group["momentum"] != 0:
        return f"{name} with momentum={group['momentum']} moves every row"
    if kind in _SGD + _ADAGRAD and group["weight_decay"] != 0:
        return f"{name} with weight_decay={group['weight_decay']} moves every row"
    if kind in _ADAGRAD and not sparse and _vanishes(group):
        return f"{name} with eps={group['eps']} divides rows without gradient by zero"
    if kind in _SGD + _ADAGRAD:
        return None
    if kind in ELEMENTWISE:
        return f"{name} moves every row"
    return f"{name} may move every row"


def _vanishes(group: dict[str, Any]) -> bool:
    """Whether Adagrad's ``eps`` is zero in a parameter's precision: 0 / (0 + eps) is then no number."""
    return any(not torch.tensor(group["eps"], dtype=p.dtype) for p in group["params"])
