"""Gradients, and optimizers run on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

ROWS, COLUMNS = 7, 5
Make = Callable[..., Optimizer]


def weight(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(ROWS, COLUMNS, generator=generator, dtype=dtype))


def coo(ids: Sequence[int], values: Tensor) -> Tensor:
    """A gradient as nn.Embedding brings it: ids in any order, repeated, not coalesced."""
    indices = torch.tensor([list(ids)], dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, values, (ROWS, COLUMNS), check_invariants=False)


def some_rows(steps: int, seed: int = 1) -> Iterator[Tensor]:
    """Sparse gradients of a few rows with repetitions, in some steps of none."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        count = 0 if step % 5 == 3 else 4
        ids = torch.randint(0, ROWS - 1, (count,), generator=generator).tolist()  # the last row is never touched
        yield coo(ids, torch.randn(count, COLUMNS, generator=generator, dtype=torch.float64))


def all_rows(steps: int, seed: int = 2, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(ROWS, COLUMNS, generator=generator, dtype=dtype)


def rate(step: int) -> float:
    """A learning rate that changes in every step."""
    return 0.1 / (1 + step % 7)


def run(optimizer: Optimizer, parameter: nn.Parameter, grads: Iterator[Tensor]) -> None:
    """Steps with a changing learning rate."""
    for step, grad in enumerate(grads):
        parameter.grad = grad.clone()
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()


def trained(make: Make, grads: Iterator[Tensor], **options: Any) -> Tensor:
    """A weight after training on the gradients."""
    parameter = weight()
    run(make([parameter], **options), parameter, grads)
    return parameter.detach()


def same_state(a: Any, b: Any) -> bool:
    """Whether two state dicts hold the same, bit by bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_state(x, y) for x, y in zip(a, b))
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)
