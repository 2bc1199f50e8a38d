"""The one gradient exchange that closes a backward pass: AlltoAll (2) of the paper's section 4.1.

Every rank sends the gradient rows it collected, column by column, to the owners. Ids do not travel again: an owner
knows what each rank asked of it, in which order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_embrace.comm.base import Communicator
from lightning_embrace.tables.request import PooledRequest
from lightning_embrace.tables.table import ShardedTable


class _Field(NamedTuple):
    """What a rank says about one table in the closing header."""

    used: int
    touched: int
    fetched: int
    pooled_bits: int


class GradientExchange:
    """Brings gradient rows to the owners of their columns and puts the averaged shard gradient into ``grad``.

    Args:
        comm: Carries the exchanges.
        tables: All sharded tables, by index.
    """

    def __init__(self, comm: Communicator, tables: list[ShardedTable]) -> None:
        self._comm = comm
        self._tables = tables

    @property
    def header_size(self) -> int:
        """Number of header fields."""
        return len(_Field._fields) * len(self._tables)

    def header(self) -> list[int]:
        """This rank's part of the closing header."""
        fields: list[int] = []
        for table in self._tables:
            window = table.window
            fields += _Field(int(window.used), window.touched_count(), len(window), window.pooled_bits())
        return fields

    def run(self, headers: list[list[int]]) -> None:
        """Exchanges and averages. Collective.

        Args:
            headers: Every rank's :meth:`header`.
        """
        size = len(_Field._fields)
        fields = [[_Field(*row[i : i + size]) for i in range(0, len(row), size)] for row in headers]
        mine = self._take(fields[self._comm.rank])
        masks = self._exchange_masks(fields, [m[0] for m in mine])
        for dtype in sorted({t.row_dtype for t in self._tables}, key=str):
            group = [t for t in self._tables if t.row_dtype == dtype]
            self._exchange_group(group, fields, mine, masks)

    def _take(self, fields: list[_Field]) -> list[tuple[Tensor, list[Tensor]]]:
        """Per table the mask of touched rows and the gradients to send: rows, then pooled requests."""
        taken = []
        for table, field in zip(self._tables, fields):
            if field.used:
                touched_U, grad_TD = table.window.take_gradient()
                taken.append((touched_U, [grad_TD, *table.window.take_pooled()]))
            else:
                taken.append((torch.empty(0, dtype=torch.bool, device=self._comm.device), []))
        return taken

    def _exchange_masks(self, fields: list[list[_Field]], mine: list[Tensor]) -> dict[tuple[int, int], Tensor]:
        """Tells the owners which of the fetched rows received a gradient, where not all did.

        Returns:
            By (rank, table index), the mask.
        """
        ranks = range(self._comm.world_size)
        me = self._comm.rank
        partial = [[f.used == 1 and f.touched < f.fetched for f in row] for row in fields]
        masks = {(me, t.index): mine[t.index] for t in self._tables if partial[me][t.index]}
        if not any(any(row) for row in partial):
            return masks
        to = {r: [t for t in self._tables if partial[me][t.index] and t.widths[r] and r != me] for r in ranks}
        sends = [sum(mine[t.index].numel() for t in to[r]) for r in ranks]
        pieces = [mine[t.index].view(torch.uint8) for r in ranks for t in to[r]]
        sent_by = {r: [t for t in self._tables if partial[r][t.index] and t.widths[me] and r != me] for r in ranks}
        wanted = [sum(fields[r][t.index].fetched for t in sent_by[r]) for r in ranks]
        send = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=self._comm.device)
        received = self._comm.all_to_all(send, sends, wanted, "ids", "masks of touched rows").wait()
        for r, piece in zip(ranks, received.split(wanted)):
            sizes = [fields[r][t.index].fetched for t in sent_by[r]]
            for table, mask in zip(sent_by[r], piece.split(sizes)):
                masks[r, table.index] = mask.bool()
        return masks

    def _exchange_group(
        self,
        group: list[ShardedTable],
        fields: list[list[_Field]],
        mine: list[tuple[Tensor, list[Tensor]]],
        masks: dict[tuple[int, int], Tensor],
    ) -> None:
        """Exchanges the gradients of all tables of one wire dtype together."""
        me, ranks = self._comm.rank, range(self._comm.world_size)
        pieces = [
            grad[:, slice(*table.ranges[r])].reshape(-1).to(table.row_dtype)
            for r in ranks
            for table in group
            for grad in mine[table.index][1]
        ]
        sends = [sum(g.shape[0] * t.widths[r] for t in group for g in mine[t.index][1]) for r in ranks]
        counts = {(r, t.index): self._row_counts(t, r, fields[r][t.index]) for r in ranks for t in group}
        wanted = [sum(sum(counts[r, t.index]) * t.widths[me] for t in group) for r in ranks]
        send = torch.cat(pieces) if pieces else torch.empty(0, dtype=group[0].row_dtype, device=self._comm.device)
        names = ", ".join(t.name for t in group)
        received = self._comm.all_to_all(send, sends, wanted, "grads", f"gradient rows of {names}").wait()
        blocks: dict[tuple[int, int], list[Tensor]] = {}
        for r, piece in zip(ranks, received.split(wanted)):
            sizes = [n * t.widths[me] for t in group for n in counts[r, t.index]]
            parts = iter(piece.split(sizes))
            for t in group:
                blocks[r, t.index] = [next(parts).view(n, t.widths[me]) for n in counts[r, t.index]]
        for table in group:
            if any(fields[r][table.index].used for r in ranks):
                parts_of = [self._place(table, r, fields[r], blocks[r, table.index], masks) for r in ranks]
                self._set_gradient(table, [p for part in parts_of for p in part])

    @staticmethod
    def _row_counts(table: ShardedTable, rank: int, field: _Field) -> list[int]:
        """Lengths of the gradient pieces that ``rank`` sends for a table: touched rows, then bags."""
        if not field.used:
            return []
        return [field.touched, *(request.sizes_B.numel() for request in _pooled(table, rank, field))]

    @staticmethod
    def _place(
        table: ShardedTable,
        rank: int,
        fields: list[_Field],
        blocks: list[Tensor],
        masks: dict[tuple[int, int], Tensor],
    ) -> list[tuple[Tensor, Tensor]]:
        """Pairs the received gradient pieces with their row ids."""
        field = fields[table.index]
        if not field.used:
            return []
        if blocks[0].shape[1] == 0:  # this rank owns no columns (D < N) and was never told the ids
            empty = torch.empty(0, dtype=torch.int64, device=blocks[0].device)
            return [(empty, blocks[0][:0])]
        ids_U = table.asked_ids(rank)
        mask = masks.get((rank, table.index))
        placed = [(ids_U if mask is None else ids_U[mask], blocks[0])]
        for request, grad_Bd in zip(_pooled(table, rank, field), blocks[1:]):
            placed.append((request.ids_L, request.row_gradients(grad_Bd.to(table.parameter.dtype))))
        return placed

    def _set_gradient(self, table: ShardedTable, parts: list[tuple[Tensor, Tensor]]) -> None:
        """Sums the ranks' rows, averages as DDP does and accumulates into the parameter's ``grad``."""
        parameter = table.parameter
        scale = 1.0 / self._comm.world_size
        if table.sparse:
            ids = torch.cat([i for i, _ in parts])
            values = torch.cat([g.to(parameter.dtype) for _, g in parts]).mul_(scale)
            grad = torch.sparse_coo_tensor(ids.unsqueeze(0), values, parameter.shape, check_invariants=False).coalesce()
            parameter.grad = grad if parameter.grad is None else (parameter.grad + grad).coalesce()
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        for ids, grad_rows in parts:
            parameter.grad.index_add_(0, ids, grad_rows.to(parameter.dtype), alpha=scale)


def _pooled(table: ShardedTable, rank: int, field: _Field) -> list[PooledRequest]:
    """The pooled requests of a rank that received a gradient."""
    return [request for k, request in enumerate(table.asked_pooled[rank]) if field.pooled_bits >> k & 1]
