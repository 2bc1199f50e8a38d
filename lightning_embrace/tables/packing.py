"""How the gradients of several tables lie in one message: by owner, then by table, then by piece. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_embrace.comm.base import Communicator
from lightning_embrace.tables.table import ShardedTable

#: by (rank, table index), how many rows each piece has that the rank sends
Counts = dict[tuple[int, int], list[int]]


def pack(
    comm: Communicator, group: Sequence[ShardedTable], grads: Mapping[int, list[Tensor]], counts: Counts
) -> tuple[Tensor, list[int], list[int]]:
    """Lays this rank's gradient pieces out for an AlltoAll.

    Args:
        comm: Says which rank this is.
        group: Tables of one wire dtype.
        grads: By table index, this rank's pieces in full width.
        counts: Their rows, for all ranks.

    Returns:
        What to send, the elements to each rank and the elements from each rank.
    """
    ranks = range(comm.world_size)
    pieces = [
        grad[:, slice(*table.ranges[r])].reshape(-1).to(table.row_dtype)
        for r in ranks
        for table in group
        for grad in grads[table.index]
    ]
    sends = [sum(g.shape[0] * t.widths[r] for t in group for g in grads[t.index]) for r in ranks]
    wanted = [sum(sum(counts[r, t.index]) * t.widths[comm.rank] for t in group) for r in ranks]
    send = torch.cat(pieces) if pieces else torch.empty(0, dtype=group[0].row_dtype, device=comm.device)
    return send, sends, wanted


def average(table: ShardedTable, parts: Sequence[tuple[Tensor, Tensor]], world_size: int) -> Tensor:
    """The ranks' gradient rows, with their ids, as the sparse gradient [V, d] of a shard: summed, divided by N."""
    ids = torch.cat([i for i, _ in parts])
    values = torch.cat([rows.to(table.parameter.dtype) for _, rows in parts]).mul_(1.0 / world_size)
    shape = table.parameter.shape
    return torch.sparse_coo_tensor(ids.unsqueeze(0), values, shape, check_invariants=False).coalesce()


def unpack(
    received: Tensor, group: Sequence[ShardedTable], counts: Counts, rank: int, wanted: Sequence[int]
) -> dict[tuple[int, int], list[Tensor]]:
    """What arrived on ``rank``: by (source, table index), its pieces [rows, d]."""
    blocks: dict[tuple[int, int], list[Tensor]] = {}
    for r, piece in enumerate(received.split(list(wanted))):
        parts = iter(piece.split([n * t.widths[rank] for t in group for n in counts[r, t.index]]))
        for t in group:
            blocks[r, t.index] = [next(parts).view(n, t.widths[rank]) for n in counts[r, t.index]]
    return blocks
