"""Optimizer state between its sharded and its full layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_embrace.checkpoint.mapped import unmapped
from lightning_embrace.comm.base import Communicator
from lightning_embrace.tables.shard import gather_columns, sparse_rows
from lightning_embrace.tables.table import ShardedTable

#: makes a hole for what a rank has [V, d] of, or [U, d] and the ids of these rows
Leave = Callable[[ShardedTable, Tensor, Tensor | None], Tensor]


def gather_optimizer_state(
    comm: Communicator, tables: list[ShardedTable], optimizer: Optimizer, to_all: bool, leave: Leave | None = None
) -> dict[str, Any]:
    """The optimizer's state dict as DDP would have it: table states [V, D] instead of [V, d]. Collective.

    Args:
        comm: Carries the exchanges.
        tables: The sharded tables.
        optimizer: A torch optimizer.
        to_all: Every rank gets the whole; else rank 0 alone, and the others keep their shards.
        leave: Makes holes in the place of states, which are not gathered then.

    Returns:
        The state dict.
    """
    state_dict = optimizer.state_dict()
    state_dict["state"] = dict(state_dict["state"])
    for number, table in table_numbers(tables, optimizer).items():
        if number in state_dict["state"]:
            state_dict["state"][number] = _whole(comm, table, state_dict["state"][number], to_all, leave)
    return state_dict


def whole_state_bytes(tables: list[ShardedTable], optimizer: Optimizer) -> int:
    """Bytes that the whole of an optimizer's table states takes."""
    need = 0
    for table in tables:
        for value in optimizer.state.get(table.parameter, {}).values():
            if is_sharded_like(table, value):
                rows = value._nnz() if value.is_sparse else table.rows
                need += rows * table.columns * value.element_size()
    return need


def shard_optimizer_state(
    tables: list[ShardedTable], optimizer: Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Cuts this rank's columns out of a full optimizer state dict.

    Args:
        tables: The sharded tables.
        optimizer: The optimizer that will load the result.
        state_dict: A state dict in DDP's layout.

    Returns:
        A state dict for ``optimizer.load_state_dict``.
    """
    states = dict(state_dict["state"])
    by_number = table_numbers(tables, optimizer)
    for number, state in states.items():
        table = by_number.get(number)
        states[number] = unmapped(state) if table is None else {k: _columns_of(table, v) for k, v in state.items()}
    return {**state_dict, "state": states}


def shard_optimizer(tables: list[ShardedTable], optimizer: Optimizer) -> None:
    """Cuts this rank's columns out of states that an optimizer made for whole tables, as Adagrad does at once."""
    for table in tables:
        if table.parameter in optimizer.state:
            state = optimizer.state[table.parameter]
            state.update({key: _columns_of(table, value) for key, value in state.items()})


def restore_optimizer(comm: Communicator, tables: list[ShardedTable], optimizer: Optimizer) -> None:
    """Replaces an optimizer's table states by whole ones, on every rank and on its CPU. Collective."""
    for table in tables:
        if table.parameter in optimizer.state:
            state = optimizer.state[table.parameter]
            for key in [k for k, v in state.items() if is_sharded_like(table, v)]:
                full = gather_columns(comm, table, state[key], to_all=True)
                assert full is not None
                state[key] = full


def table_numbers(tables: list[ShardedTable], optimizer: Optimizer) -> dict[int, ShardedTable]:
    """The number under which torch's state dicts keep each table's state."""
    by_id = {id(t.parameter): t for t in tables}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {number: by_id[id(p)] for number, p in enumerate(parameters) if id(p) in by_id}


def is_sharded_like(table: ShardedTable, value: Any) -> bool:
    """Whether a state of a table's is cut by columns as the table is."""
    return isinstance(value, Tensor) and value.shape == table.parameter.shape


def _whole(
    comm: Communicator, table: ShardedTable, state: dict[str, Any], to_all: bool, leave: Leave | None
) -> dict[str, Any]:
    whole = dict(state)
    for key in sorted(k for k, v in state.items() if is_sharded_like(table, v)):
        if leave is not None:
            part = sparse_rows(comm, table, state[key], to_all) if state[key].is_sparse else (state[key], None)
            whole[key] = leave(table, *part)
            continue
        full = gather_columns(comm, table, state[key], to_all)
        if full is not None:
            whole[key] = full
    return whole


def _columns_of(table: ShardedTable, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.shape != (table.rows, table.columns):
        return value
    start, stop = table.ranges[table.rank]
    if value.is_sparse:
        value = value.coalesce()
        values = value.values()[:, start:stop].clone()
        shape = (table.rows, stop - start)
        return torch.sparse_coo_tensor(value.indices(), values, shape, is_coalesced=True, check_invariants=False)
    return value[:, start:stop].clone()
