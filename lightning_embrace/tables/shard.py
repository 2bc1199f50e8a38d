"""Makes shards of full tables and full tables of shards."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_embrace.comm.base import Communicator
from lightning_embrace.tables.table import ShardedTable

#: rows travel in pieces of about this size, so that no second full table is ever needed
_PIECE_BYTES = 8 << 20


def scatter_columns(comm: Communicator, table: ShardedTable, full_VD: Tensor) -> Tensor:
    """Gives every rank its columns of rank 0's table. Collective.

    Args:
        comm: Carries the exchange.
        table: The table.
        full_VD: The whole table; its content counts on rank 0 only.

    Returns:
        This rank's columns [V, d], on the communicator's device.
    """
    widths, me = table.widths, comm.rank
    shard_Vd = full_VD.new_empty(table.rows, widths[me], device=comm.device, requires_grad=False)
    for start, stop in _pieces(table, full_VD.element_size()):
        rows = full_VD[start:stop].detach()
        count = stop - start
        if me == 0:
            send = torch.cat([rows[:, a:b].reshape(-1) for a, b in table.ranges]).to(comm.device)
            sends = [count * w for w in widths]
        else:
            send, sends = rows.new_empty(0, device=comm.device), [0] * comm.world_size
        wanted = [count * widths[me] if r == 0 else 0 for r in range(comm.world_size)]
        received = comm.all_to_all(send, sends, wanted, "setup", f"initial weights of {table.name}").wait()
        shard_Vd[start:stop] = received.view(count, widths[me])
    return shard_Vd


def gather_columns(comm: Communicator, table: ShardedTable, shard_Vd: Tensor, to_all: bool) -> Tensor | None:
    """Puts a full table together from its shards. Collective.

    Args:
        comm: Carries the exchange.
        table: The table.
        shard_Vd: This rank's columns of its weight or of a part of its optimizer state, dense or sparse.
        to_all: Every rank gets the whole; else rank 0 alone.

    Returns:
        The whole [V, D] on the CPU, or None where it was not wanted.
    """
    if shard_Vd.is_sparse:
        return _gather_sparse(comm, table, shard_Vd, to_all)
    wants = to_all or comm.rank == 0
    full_VD = torch.empty(shard_Vd.shape[0], table.columns, dtype=shard_Vd.dtype) if wants else None
    start = 0
    for piece_nD in gather_pieces(comm, table, shard_Vd, to_all):
        assert full_VD is not None
        full_VD[start : start + len(piece_nD)] = piece_nD
        start += len(piece_nD)
    return full_VD


def gather_pieces(comm: Communicator, table: ShardedTable, shard_Vd: Tensor, to_all: bool = False) -> Iterator[Tensor]:
    """A full table in pieces, where there need be no room for the whole. Collective: every rank takes all of them.

    Args:
        comm: Carries the exchange.
        table: The table.
        shard_Vd: This rank's columns of its weight or of a part of its optimizer state, dense.
        to_all: Every rank gets the whole; else rank 0 alone, and there is nothing to take elsewhere.

    Yields:
        Consecutive rows [n, D].
    """
    ranks = range(comm.world_size)
    takers = list(ranks) if to_all else [0]
    wants = comm.rank in takers
    for start, stop in _pieces(table, shard_Vd.element_size(), shard_Vd.shape[0]):
        piece = shard_Vd[start:stop].detach().reshape(-1).to(comm.device)
        sends = [piece.numel() if r in takers else 0 for r in ranks]
        wanted = [(stop - start) * w if wants else 0 for w in table.widths]
        send = piece.repeat(len(takers))
        received = comm.all_to_all(send, sends, wanted, "state", f"state of {table.name}").wait()
        if wants:
            yield torch.cat([part.view(stop - start, -1) for part in received.split(wanted) if part.numel()], dim=1)


def _gather_sparse(comm: Communicator, table: ShardedTable, shard: Tensor, to_all: bool) -> Tensor | None:
    values_Ud, ids_U = sparse_rows(comm, table, shard, to_all)
    full_UD = gather_columns(comm, table, values_Ud, to_all)
    if full_UD is None:
        return None
    shape = (table.rows, table.columns)
    return torch.sparse_coo_tensor(ids_U.unsqueeze(0), full_UD, shape, is_coalesced=True, check_invariants=False)


def sparse_rows(comm: Communicator, table: ShardedTable, shard: Tensor, to_all: bool) -> tuple[Tensor, Tensor]:
    """The rows that a sparse state has (SGD's momentum of a sparse table). Collective.

    Every rank that owns columns has the same rows.

    Args:
        comm: Carries the exchange.
        table: The table.
        shard: This rank's columns of the state, sparse.
        to_all: Every rank gets the ids; else rank 0 alone.

    Returns:
        This rank's columns of these rows [U, d], and on the CPU the ids [U], or none where they are not wanted.
    """
    shard = shard.coalesce()
    count = int(comm.gather(torch.tensor([shard.indices().shape[1]]), f"rows of {table.name}").wait()[0])
    takers = list(range(comm.world_size)) if to_all else [0]
    ids = shard.indices()[0].to(comm.device).repeat(len(takers) if comm.rank == 0 else 0)
    sends = [count if comm.rank == 0 and r in takers else 0 for r in range(comm.world_size)]
    wanted = [count if r == 0 and comm.rank in takers else 0 for r in range(comm.world_size)]
    ids = comm.all_to_all(ids, sends, wanted, "state", f"row ids of {table.name}").wait()
    values = shard.values() if shard.shape[1] else shard.values().new_empty(count, 0)
    return values, ids.cpu()


def _pieces(table: ShardedTable, itemsize: int, rows: int | None = None) -> list[tuple[int, int]]:
    rows = table.rows if rows is None else rows
    step = max(1, _PIECE_BYTES // max(1, table.columns * itemsize))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
