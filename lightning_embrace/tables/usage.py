"""What one rank looks up in a step, for the printed plan."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_embrace.tables.table import ShardedTable


class Usage(NamedTuple):
    """Mean over ranks.

    Attributes:
        rows: U, different rows.
        vectors: Rows, or sums and means of bags instead of them, that travel.
        asking: Bytes that say what is asked for.
    """

    rows: float
    vectors: float
    asking: float


def usage_of(table: ShardedTable) -> Usage:
    """Counts what was asked since the table last changed; a rank that owns columns knows it of all ranks."""
    ranks = range(len(table.widths))
    rows = vectors = asking = 0
    for rank in ranks:
        ids_U, bags = table.asked_ids(rank), table.asked_pooled[rank]
        rows += torch.unique(torch.cat([ids_U, *(b.ids_L for b in bags)])).numel() if bags else ids_U.numel()
        vectors += ids_U.numel() + sum(b.sizes_B.numel() for b in bags)
        asking += ids_U.numel() * table.id_dtype.itemsize
        asking += sum(b.wire_bytes(table.id_dtype.itemsize, table.parameter.dtype.itemsize) for b in bags)
    return Usage(*(n / len(ranks) for n in (rows, vectors, asking)))
