"""What the row-sparse optimizers share: torch's own step for dense gradients, a step on some rows for sparse ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

#: settings without a meaning for some rows only, and what to write instead
_REFUSED = {"amsgrad": "False", "capturable": "False", "differentiable": "False", "fused": "None"}


class RowSparse(Optimizer):
    """A torch optimizer that also takes sparse gradients, whose rows alone it moves.

    Subclasses name torch's class as their second base: it keeps its signature, its state and its numbers for dense
    gradients.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step on all parameters that have a gradient.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returned.

        Raises:
            ValueError: A sparse gradient meets a setting that is not defined for some rows only; nothing has moved.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sparse = [
            (group, p, p.grad)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and p.grad.is_sparse
        ]
        for group, parameter, grad in sparse:
            self._check(group, parameter, grad)
        try:
            for _, parameter, _ in sparse:
                parameter.grad = None
            without_hooks(super().step)(self)
        finally:
            for _, parameter, grad in sparse:
                parameter.grad = grad
        for group, parameter, grad in sparse:
            self._step_rows(group, parameter, grad.coalesce())
        return loss

    def _step_rows(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        """Moves the rows of a coalesced gradient; one of no rows counts as a step all the same."""
        raise NotImplementedError

    def _check(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        shape = tuple(parameter.shape)
        if grad.sparse_dim() != 1:
            raise ValueError(
                f"{name_of(self)} takes sparse gradients of whole rows (sparse_dim=1); the parameter of shape {shape}"
                f" has one with sparse_dim={grad.sparse_dim()}. Use torch.optim.SparseAdam for it."
            )
        reason = refuses_rows(self, group)
        if reason is not None:
            raise ValueError(f"The parameter of shape {shape} has a sparse gradient, and {reason}")
        if getattr(self, "found_inf", None) is not None:
            raise ValueError(
                f"The parameter of shape {shape} has a sparse gradient, and {name_of(self)} was built with fused=True,"
                " to which GradScaler leaves the unscaling of all gradients. Use fused=None."
            )


def refuses_rows(optimizer: RowSparse, group: dict[str, Any]) -> str | None:
    """Which setting keeps a parameter group from taking sparse gradients.

    Args:
        optimizer: The optimizer.
        group: One of its parameter groups.

    Returns:
        The setting and what to write instead, or None where it takes them.
    """
    for setting, instead in _REFUSED.items():
        if group.get(setting):
            return (
                f"{setting}={group[setting]} of {name_of(optimizer)} is not defined for sparse gradients. Put the"
                f" parameter into a parameter group with {setting}={instead}, or use sparse=False for its embedding."
            )
    return None


def without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """A class's step as a function of the optimizer, without the hooks that torch wraps around it.

    torch wraps a class's step when the class is first instantiated: whether a base class's step runs the hooks (for
    a second time) depends on what else the program has built.
    """
    function: Any = getattr(step, "__func__", step)
    return cast("Callable[..., Any]", function.__wrapped__ if getattr(function, "hooked", False) else function)


def name_of(optimizer: Optimizer) -> str:
    """A class's name as a user writes it."""
    kind = type(optimizer)
    ours = kind.__module__.startswith("lightning_embrace.")
    return ("lightning_embrace.optim." if ours else "") + kind.__qualname__


def scalar(value: Any) -> Any:
    """A setting as torch's formulas take it: a tensor of one element has no dimension."""
    return value.squeeze() if isinstance(value, Tensor) else value


def first_step() -> Tensor:
    """The step count of a new state, as torch's own optimizers create it."""
    double = torch.get_default_dtype() == torch.float64
    return torch.zeros((), dtype=torch.float64 if double else torch.float32, device="cpu")


def prepared(grad: Tensor, parameter: Tensor, weight_decay: Any, maximize: bool) -> Tensor:
    """The gradient that torch's formulas start from: its sign turned to maximize, with L2 decay on its rows.

    Args:
        grad: A coalesced gradient.
        parameter: Its parameter.
        weight_decay: The L2 penalty.
        maximize: Whether the objective is maximized.

    Returns:
        A coalesced gradient of the same rows.
    """
    values = -grad.values() if maximize else grad.values()
    if weight_decay != 0:
        values = values.add(parameter.index_select(0, grad.indices()[0]), alpha=weight_decay)
    return torch.sparse_coo_tensor(
        grad.indices(), values, grad.shape, dtype=values.dtype, is_coalesced=True, check_invariants=False
    )
