"""Norms and clipping of gradients of which this rank holds only some columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

#: tells every rank some integers, as many on each, and returns every rank's
Tell = Callable[[Sequence[int]], list[list[int]]]


def alone(words: Sequence[int]) -> list[list[int]]:
    """The :data:`Tell` of a rank that has no others."""
    return [list(words)]


def norms(tell: Tell, gradients: Sequence[Tensor], sharded: Sequence[bool], norm_type: float) -> Tensor:
    """The norm of each gradient, of sharded ones over all ranks. Collective if any is sharded.

    Args:
        tell: Carries the norms of the shards.
        gradients: Dense or sparse, as many on every rank.
        sharded: Which of them are this rank's columns of a whole; the others are equal on all ranks.
        norm_type: p; ``math.inf``: the largest magnitude.

    Returns:
        The norms, [G] float64 on the CPU.

    Raises:
        ValueError: p is not positive, and there are shards: their norms could not be put together.
    """
    own = [_norm(g, norm_type) for g in gradients]
    local = torch.stack([n.to("cpu", torch.float64) for n in own]) if own else torch.zeros(0, dtype=torch.float64)
    if any(sharded):
        if not norm_type > 0:
            raise ValueError(
                f"The norm of the gradient of a sharded table was asked for with norm_type={norm_type}. Give a positive"
                " number or math.inf."
            )
        mask = torch.tensor(sharded, dtype=torch.bool)
        bits = local[mask].view(torch.int64)  # what headers are made of
        by_rank = torch.tensor(tell(bits.tolist()), dtype=torch.int64).view(torch.float64)
        local[mask] = by_rank.amax(0) if math.isinf(norm_type) else torch.linalg.vector_norm(by_rank, norm_type, dim=0)
    return local


def clip_by_norm(
    tell: Tell,
    parameters: Iterable[Tensor],
    sharded: Collection[int],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales all gradients so that their norm together is at most ``max_norm``, as torch's `clip_grad_norm_` does.

    Args:
        tell: Carries the norms of the shards. Collective if any gradient is sharded.
        parameters: The parameters; gradients may be sparse.
        sharded: Ids of the parameters of which each rank holds some columns.
        max_norm: The bound.
        norm_type: p, or ``math.inf``.
        error_if_nonfinite: Raise where there is no such norm.

    Returns:
        The norm before clipping, the same on every rank.

    Raises:
        RuntimeError: The norm is infinite or NaN; worded as torch words it.
    """
    chosen = [p for p in parameters if p.grad is not None]
    for parameter in chosen:
        _coalesce(parameter)
    gradients = [p.grad for p in chosen if p.grad is not None]
    single = norms(tell, gradients, [id(p) in sharded for p in chosen], norm_type)
    total = torch.linalg.vector_norm(single, norm_type) if single.numel() else torch.zeros(())
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be"
            " clipped. To disable this error and scale the gradients by the non-finite norm anyway, set"
            " `error_if_nonfinite=False`"
        )
    factor = float((max_norm / (total + 1e-6)).clamp(max=1.0))
    for gradient in gradients:
        _elements(gradient).mul_(factor)
    return total


def clip_by_value(parameters: Iterable[Tensor], value: float) -> None:
    """Clamps every element of every gradient to [−value, value]; elements that a sparse one does not have stay zero."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        _coalesce(parameter)
        _elements(parameter.grad).clamp_(-value, value)


def _coalesce(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse and not parameter.grad.is_coalesced():
        parameter.grad = parameter.grad.coalesce()


def _elements(gradient: Tensor) -> Tensor:
    """What to change in place: a sparse tensor's own `mul_` puts other values in the place of the shared ones."""
    return gradient.detach()._values() if gradient.is_sparse else gradient.detach()


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    values = _elements(gradient.coalesce() if gradient.is_sparse else gradient)
    if values.numel() == 0:  # a rank that owns no columns, or no row was touched
        return torch.zeros((), dtype=torch.float64)
    # in fp16 a sum of squares overflows that fits a gradient
    norm: Tensor = torch.linalg.vector_norm(values, norm_type, dtype=torch.promote_types(values.dtype, torch.float32))
    return norm
