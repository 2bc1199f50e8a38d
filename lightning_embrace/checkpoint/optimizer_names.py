"""Optimizer states under their parameters' names, as Lightning's sharded checkpoints have them, and DDP's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_embrace.checkpoint.optimizer_state import is_sharded_like, table_numbers
from lightning_embrace.tables.state import shard_as_dtensor
from lightning_embrace.tables.table import ShardedTable

#: torch.distributed.checkpoint stores no sparse tensors: one is stored as a dictionary with this key alone
SPARSE = "sparse_coo"


def named_state(
    model: nn.Module, tables: list[ShardedTable], optimizer: Optimizer, state_dict: dict[str, Any] | None = None
) -> dict[str, Any]:
    """An optimizer's state dict with names for numbers, and DTensors for the table states. Communicates with nobody.

    Args:
        model: Gives its parameters' names; others are called by their number.
        tables: The sharded tables.
        optimizer: A torch optimizer.
        state_dict: Its state dict, None: as it makes it itself.

    Returns:
        What torch.distributed.checkpoint can store: no sparse tensors.
    """
    state_dict = dict(optimizer.state_dict() if state_dict is None else state_dict)
    known = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = [known.get(id(p), f"parameter {number}") for number, p in enumerate(parameters)]
    by_number = table_numbers(tables, optimizer)
    state_dict["state"] = {
        _name(number, names): {key: _stored(value, by_number.get(number)) for key, value in state.items()}
        for number, state in state_dict["state"].items()
    }
    state_dict["param_groups"] = [
        {**group, "params": [_name(n, names) for n in group["params"]]} for group in state_dict["param_groups"]
    ]
    return state_dict


def numbers_of(param_groups: Iterable[Mapping[str, Any]]) -> dict[Any, int]:
    """The number that DDP's layout has for each name in saved groups."""
    names = [name for group in param_groups for name in group["params"]]
    return {name: number for number, name in enumerate(names)}


def numbered_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """DDP's layout of a state dict that has names for its parameters; of one with numbers, the same.

    Args:
        state_dict: As it was stored; without ``state`` where the optimizer has made none.

    Returns:
        The same with numbers. Sparse tensors are left as they are stored, see :func:`unpacked_state`.
    """
    if "param_groups" not in state_dict:
        return dict(state_dict)  # nothing of torch's
    groups = [dict(group) for group in state_dict["param_groups"]]
    numbers = numbers_of(groups)
    for group in groups:
        group["params"] = [numbers[name] for name in group["params"]]
    states = {numbers.get(name, name): state for name, state in state_dict.get("state", {}).items()}
    # in the parameters' order; what belongs to none of them comes last
    order = sorted(states, key=lambda n: (0, n) if isinstance(n, int) else (1, 0))
    return {**state_dict, "state": {number: states[number] for number in order}, "param_groups": groups}


def unpacked_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict whose sparse tensors are sparse tensors."""
    if "state" not in state_dict:
        return dict(state_dict)
    states = {
        number: {key: _unpacked(value) for key, value in state.items()} if isinstance(state, Mapping) else state
        for number, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def _name(number: Any, names: list[str]) -> Any:
    return names[number] if isinstance(number, int) else number


def _stored(value: Any, table: ShardedTable | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_sparse:
        value = value.coalesce()
        rows = value.values()
        values = rows if table is None else shard_as_dtensor(table, rows)
        return {SPARSE: {"indices": value.indices(), "values": values, "size": [value.shape[0], *values.shape[1:]]}}
    return shard_as_dtensor(table, value) if table is not None and is_sharded_like(table, value) else value


def _unpacked(value: Any) -> Any:
    if not isinstance(value, Mapping) or list(value) != [SPARSE]:
        return value
    parts = value[SPARSE]
    size = (parts["size"][0], *parts["values"].shape[1:])
    return torch.sparse_coo_tensor(parts["indices"], parts["values"], size, is_coalesced=True, check_invariants=False)
