"""Refuses, before the first step, optimizers that cannot train a sharded or a sparse table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_embrace.tables.find import TableSpec

#: torch's optimizers that treat every element by itself: on shards they do what they do on the whole
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.ASGD,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SparseAdam,
    }
)
_TAKES_SPARSE = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)


def check_optimizers(optimizers: Sequence[Optimizer], specs: Sequence[TableSpec]) -> None:
    """Checks every table against the optimizer that trains it.

    Args:
        optimizers: All optimizers.
        specs: All tables.

    Raises:
        ValueError: The optimizer refuses such gradients, or would compute something else on shards than on the whole.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            mine = {id(p) for p in group["params"]}
            for spec in specs:
                if id(spec.parameter) in mine and spec.place != "frozen":
                    _check_sparse(optimizer, group, spec)
                    if spec.place == "sharded":
                        _check_elementwise(optimizer, group, spec)


def _check_sparse(optimizer: Optimizer, group: dict[str, Any], spec: TableSpec) -> None:
    kind = type(optimizer)
    tied = spec.place == "dense"  # its gradient is dense whatever the module asks for
    if spec.sparse and not tied:
        if kind in ELEMENTWISE and kind not in _TAKES_SPARSE:
            raise ValueError(
                f"Table {spec.name!r} has sparse=True, and {kind.__name__} does not support sparse gradients. Use SGD,"
                " Adagrad or SparseAdam, or sparse=False (the exchange is as small; every row then follows"
                f" {kind.__name__}'s dense rule)."
            )
        if group.get("weight_decay"):
            raise ValueError(
                f"Table {spec.name!r} has sparse=True, and weight_decay={group['weight_decay']} is not compatible with"
                " sparse gradients. Put the table into a parameter group with weight_decay=0."
            )
    elif kind is torch.optim.SparseAdam:
        raise ValueError(
            f"Table {spec.name!r} has {'a tied weight' if tied else 'sparse=False'}, and SparseAdam does not support"
            " dense gradients. Use sparse=True for the table, or Adam."
        )


def _check_elementwise(optimizer: Optimizer, group: dict[str, Any], spec: TableSpec) -> None:
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        return
    verdict = _try_on_columns(optimizer, group, spec.sparse)
    if verdict is not None:
        raise ValueError(
            f"Table {spec.name!r} is sharded by columns, and {kind.__module__}.{kind.__qualname__} {verdict}. Use an"
            " elementwise optimizer (SGD, Adam, AdamW, Adagrad, …), or keep the table whole:"
            f" EmbRaceStrategy(tables=['*', '!{spec.name}'])."
        )


def _try_on_columns(optimizer: Optimizer, group: dict[str, Any], sparse: bool) -> str | None:
    """Whether coupling between columns can be seen: three steps on a tiny table, whole and in two halves."""
    options = {k: v for k, v in group.items() if k in optimizer.defaults}
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    grads = [torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(3)]

    def run(columns: slice) -> torch.Tensor:
        parameter = nn.Parameter(start[:, columns].clone())
        trial = type(optimizer)([parameter], **options)
        for grad in grads:
            part = grad[:, columns].clone()
            parameter.grad = part.to_sparse(1) if sparse else part
            trial.step()
        return parameter.detach()

    try:
        whole = run(slice(0, 4))
        halves = torch.cat([run(slice(0, 2)), run(slice(2, 4))], dim=1)
    except Exception as error:
        return f"could not be tried on a small table ({type(error).__name__}: {error})"
    if not torch.allclose(whole, halves, rtol=1e-12, atol=1e-14):
        return "couples columns: on shards it would compute other numbers than on the whole table"
    return None
