"""A shard in state dicts: shown as DTensor ``Shard(1)``, loaded from a full table or a DTensor."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from lightning_embrace.tables.table import ShardedTable


@functools.lru_cache(maxsize=4)
def _mesh(device_type: str, group: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device_type)


def shard_as_dtensor(table: ShardedTable, shard: Tensor | None = None) -> Tensor:
    """This rank's part of a table (or of its optimizer state) as a DTensor of the whole, as FSDP2 shows it.

    Args:
        table: The table.
        shard: A tensor whose columns are sharded as the table's weight, default that weight; of a sparse state, its
            rows.

    Returns:
        A DTensor of logical shape [V, D], or [rows, D]; no communication takes place.
    """
    local_Vd = table.shard_Vd if shard is None else shard
    mesh = _mesh(local_Vd.device.type, dist.group.WORLD)
    shape = torch.Size((local_Vd.shape[0], table.columns))
    return DTensor.from_local(local_Vd, mesh, [Shard(1)], run_check=False, shape=shape, stride=(table.columns, 1))


def load_shard(table: ShardedTable, value: Tensor) -> Tensor:
    """This rank's columns of what a state dict holds for a table.

    Args:
        table: The table.
        value: A full table [V, D] or a DTensor of one.

    Returns:
        The columns [V, d].

    Raises:
        ValueError: It has another shape; worded as torch words it, with the shape of the whole table.
    """
    whole = (table.rows, table.columns)
    if tuple(value.shape) != whole:
        raise ValueError(
            f"copying a param with shape {tuple(value.shape)} from checkpoint, the shape in current model is {whole}."
        )
    if isinstance(value, DTensor):
        if value.placements == (Shard(1),) and value.to_local().shape == table.parameter.shape:
            return value.to_local()
        value = value.full_tensor()
    start, stop = table.ranges[table.rank]
    return value[:, start:stop]
