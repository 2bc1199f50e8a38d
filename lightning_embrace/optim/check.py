"""Refuses, before the first step, optimizers that cannot train a sharded or a sparse table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_embrace.optim.kinds import ELEMENTWISE
from lightning_embrace.optim.rows import RowSparse, refuses_rows
from lightning_embrace.optim.trial import step, trial_of
from lightning_embrace.tables.find import TableSpec

_TAKES_SPARSE = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
# the trial table: in halves too it is larger than the sizes from which optimizers begin to factor their state (128)
_TRIAL_SHAPE = (160, 320)
_TRIAL_STEPS = 8


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
        _check_takes_sparse(optimizer, group, spec)
    elif kind is torch.optim.SparseAdam:
        raise ValueError(
            f"Table {spec.name!r} has {'a tied weight' if tied else 'sparse=False'}, and SparseAdam does not support"
            " dense gradients. Use sparse=True for the table, or"
            " lightning_embrace.optim.Adam, which takes both."
        )


def _check_takes_sparse(optimizer: Optimizer, group: dict[str, Any], spec: TableSpec) -> None:
    kind = type(optimizer)
    if isinstance(optimizer, RowSparse):
        reason = refuses_rows(optimizer, group)
        if reason is not None:
            raise ValueError(f"Table {spec.name!r} has sparse=True, and {reason}")
    elif kind.__module__.startswith("torch.optim") and kind not in _TAKES_SPARSE:
        ours = kind.__name__ if kind in (torch.optim.Adam, torch.optim.AdamW) else "Adam"
        raise ValueError(
            f"Table {spec.name!r} has sparse=True, and {kind.__name__} does not support sparse gradients. Use"
            f" lightning_embrace.optim.{ours} (for dense and sparse parameters together), SGD, Adagrad or SparseAdam,"
            f" or sparse=False (the exchange is as small; every row then follows {kind.__name__}'s dense rule)."
        )
    elif isinstance(optimizer, _TAKES_SPARSE) and group.get("weight_decay"):
        ours = "SGD" if isinstance(optimizer, torch.optim.SGD) else "Adagrad"
        raise ValueError(
            f"Table {spec.name!r} has sparse=True, and weight_decay={group['weight_decay']} is not compatible with"
            " sparse gradients. Put the table into a parameter group with weight_decay=0. Or use"
            f" lightning_embrace.optim.{ours}, which decays the rows of the gradient."
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
    """Whether coupling between columns can be seen: some steps on a small table, whole and in two halves."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(1 + _TRIAL_STEPS, *_TRIAL_SHAPE, generator=generator, dtype=torch.float64)
    rows, columns = _TRIAL_SHAPE
    all_rows = torch.arange(rows).unsqueeze(0)

    def run(part: slice) -> torch.Tensor:
        parameter = nn.Parameter(start[:, part].clone())
        trial = trial_of(optimizer, group, parameter)
        for grad in grads:
            values = grad[:, part].clone()
            parameter.grad = values
            if sparse:
                parameter.grad = torch.sparse_coo_tensor(all_rows, values, values.shape, check_invariants=False)
            step(trial)
        return parameter.detach()

    try:
        whole = run(slice(0, columns))
        halves = torch.cat([run(slice(0, columns // 2)), run(slice(columns // 2, columns))], dim=1)
    except Exception as error:
        return f"could not be tried on a small table ({type(error).__name__}: {error})"
    if not torch.allclose(whole, halves, rtol=1e-12, atol=1e-14):
        return "couples columns: on shards it would compute other numbers than on the whole table"
    return None
