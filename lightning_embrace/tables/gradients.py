"""The exchange of gradients that a backward pass has brought: AlltoAll (2) of the paper's section 4.1.

Every rank sends the gradient rows it collected, column by column, to the owners. Ids do not travel again: an owner
knows what each rank asked of it, in which order. Rows that nobody looks up in the next step may travel later.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_embrace.comm.base import Communicator, Handle
from lightning_embrace.tables.delayed import DelayedRows, LateExchange
from lightning_embrace.tables.packing import Counts, average, pack, unpack
from lightning_embrace.tables.request import PooledRequest
from lightning_embrace.tables.split import prior_rows
from lightning_embrace.tables.table import ShardedTable


class _Field(NamedTuple):
    """What a rank says about one table in the header that comes before."""

    used: int
    touched: int
    fetched: int
    pooled_bits: int
    clean: int


class Taken(NamedTuple):
    """What this rank's look-ups have collected for one table.

    Attributes:
        used: A backward pass came by, even one without rows.
        touched_U: Which of the fetched rows received a gradient.
        pieces: Gradients in full width: of these rows, then of the bags of pooled requests; empty if not used.
        pooled_bits: Bit k is set when pooled request k received a gradient.
        clean: Nothing was left in ``grad`` before.
    """

    used: bool
    touched_U: Tensor
    pieces: list[Tensor]
    pooled_bits: int
    clean: bool

    @property
    def touched(self) -> int:
        """Number of rows that received a gradient."""
        return self.pieces[0].shape[0] if self.used else 0

    def field(self, table: ShardedTable) -> _Field:
        """What the header says of it."""
        return _Field(int(self.used), self.touched, len(table.window), self.pooled_bits, int(self.clean))


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

    def take(self, chosen: Container[int] | None = None) -> list[Taken]:
        """Takes what has been collected, for all tables or for those with the chosen indices."""
        return [self._take(table, chosen is None or table.index in chosen) for table in self._tables]

    def header(self, taken: Sequence[Taken]) -> list[int]:
        """This rank's part of the header that comes before :meth:`start`."""
        return [number for table, part in zip(self._tables, taken) for number in part.field(table)]

    def start(self, taken: Sequence[Taken], headers: list[list[int]], next_rows: Mapping[int, Tensor]) -> Arriving:
        """Starts the exchange. Collective.

        Args:
            taken: What this rank has.
            headers: Every rank's :meth:`header`.
            next_rows: By table whose update may come in parts, all rows that any rank looks up in the next step.

        Returns:
            What is on its way.
        """
        size = len(_Field._fields)
        fields = [[_Field(*row[i : i + size]) for i in range(0, len(row), size)] for row in headers]
        masks = self._exchange_masks(fields, [part.touched_U for part in taken])
        late = self._late(fields, masks, next_rows)
        arriving = Arriving(self._comm.world_size)
        for dtype in sorted({t.row_dtype for t in self._tables}, key=str):
            group = [t for t in self._tables if t.row_dtype == dtype and any(row[t.index].used for row in fields)]
            if not group:
                continue
            arriving.groups.append(self._send(group, fields, taken, masks, late))
            delayed = [t for t in group if t.index in late]
            # a rank without columns (D < N) knows its own rows only, and must not decide by them
            if any(0 in t.widths or any(mask.any() for _, mask in late[t.index]) for t in delayed):
                arriving.late.append(self._delay(delayed, taken, late))
        return arriving

    def _take(self, table: ShardedTable, chosen: bool) -> Taken:
        clean = table.parameter.grad is None
        gradient = table.window.take_gradient() if chosen else None
        if gradient is None:
            return Taken(False, torch.empty(0, dtype=torch.bool, device=self._comm.device), [], 0, clean)
        return Taken(True, gradient.touched_U, [gradient.grad_TD, *gradient.pooled], gradient.pooled_bits, clean)

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

    def _late(
        self,
        fields: list[list[_Field]],
        masks: dict[tuple[int, int], Tensor],
        next_rows: Mapping[int, Tensor],
    ) -> dict[int, list[tuple[Tensor, Tensor]]]:
        """By table that is split, for each rank the ids of its gradient rows and the mask of the delayed ones.

        A table is split when some rank used it, and when nothing was left in ``grad`` before on any. Nor when some rank
        pooled: the rows of its bags get their gradient now, and a row must not get one rank's now and another's later.
        """
        late: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for index, rows in next_rows.items():
            by_rank = [row[index] for row in fields]
            if any(f.used for f in by_rank) and all(f.clean and not f.pooled_bits for f in by_rank):
                ids = [self._touched_ids(self._tables[index], r, f, masks) for r, f in enumerate(by_rank)]
                late[index] = [(i, ~prior_rows(i, rows)) for i in ids]
        return late

    def _touched_ids(
        self, table: ShardedTable, rank: int, field: _Field, masks: dict[tuple[int, int], Tensor]
    ) -> Tensor:
        """Rows for which a rank has a gradient; a rank without columns (D < N) knows its own only."""
        ids_U = table.asked_ids(rank)
        if not field.used or (rank != self._comm.rank and table.widths[self._comm.rank] == 0):
            return ids_U[:0]
        mask = masks.get((rank, table.index))
        return ids_U if mask is None else ids_U[mask]

    def _send(
        self,
        group: list[ShardedTable],
        fields: list[list[_Field]],
        taken: Sequence[Taken],
        masks: dict[tuple[int, int], Tensor],
        late: dict[int, list[tuple[Tensor, Tensor]]],
    ) -> _Group:
        """Sends the gradients of all tables of one wire dtype together, without the delayed rows."""
        me, ranks = self._comm.rank, range(self._comm.world_size)
        grads = {t.index: list(taken[t.index].pieces) for t in group}
        counts: Counts = {(r, t.index): self._row_counts(t, r, fields[r][t.index]) for r in ranks for t in group}
        for t in group:
            for r, (_, delayed_T) in enumerate(late.get(t.index, [])):
                if counts[r, t.index]:
                    counts[r, t.index][0] -= int(delayed_T.sum())
            if t.index in late and grads[t.index]:
                grads[t.index][0] = grads[t.index][0][~late[t.index][me][1]]
        send, sends, wanted = pack(self._comm, group, grads, counts)
        names = ", ".join(t.name for t in group)
        handle = self._comm.all_to_all(send, sends, wanted, "grads", f"gradient rows of {names}")
        ids = {(r, t.index): self._ids(t, r, fields[r][t.index], masks, late) for r in ranks for t in group}
        pooled = {(r, t.index): _pooled(t, r, fields[r][t.index]) for r in ranks for t in group}
        return _Group(group, handle, me, wanted, counts, ids, pooled)

    def _delay(
        self,
        group: list[ShardedTable],
        taken: Sequence[Taken],
        late: dict[int, list[tuple[Tensor, Tensor]]],
    ) -> LateExchange:
        me, comm = self._comm.rank, self._comm
        # the first piece are the rows; a rank that did not use the table sends none of them
        rows = {t.index: taken[t.index].pieces[0] if taken[t.index].used else t.window.rows_UD[:0] for t in group}
        grads = {t.index: [rows[t.index][late[t.index][me][1]]] for t in group}
        ids = {(r, t.index): i[mask] for t in group for r, (i, mask) in enumerate(late[t.index])}
        counts: Counts = {place: [i.numel()] for place, i in ids.items()}
        send, sends, wanted = pack(comm, group, grads, counts)
        return LateExchange(comm, send, sends, wanted, [DelayedRows(t, ids, comm.world_size) for t in group], counts)

    @staticmethod
    def _row_counts(table: ShardedTable, rank: int, field: _Field) -> list[int]:
        """Lengths of the gradient pieces that ``rank`` sends for a table: touched rows, then bags."""
        if not field.used:
            return []
        return [field.touched, *(request.sizes_B.numel() for request in _pooled(table, rank, field))]

    def _ids(
        self,
        table: ShardedTable,
        rank: int,
        field: _Field,
        masks: dict[tuple[int, int], Tensor],
        late: dict[int, list[tuple[Tensor, Tensor]]],
    ) -> Tensor:
        """Of the rows that a rank sends now."""
        if table.index in late:
            ids_T, delayed_T = late[table.index][rank]
            return ids_T[~delayed_T]
        return self._touched_ids(table, rank, field, masks)


class _Group(NamedTuple):
    """Tables of one wire dtype whose gradients are on their way; the rest by (rank, table index)."""

    tables: list[ShardedTable]
    handle: Handle
    rank: int
    wanted: list[int]
    counts: Counts
    ids: dict[tuple[int, int], Tensor]
    pooled: dict[tuple[int, int], list[PooledRequest]]


class Arriving:
    """Gradients that are on their way.

    Attributes:
        groups: What comes now.
        late: Exchanges of delayed rows, which the low-priority queue is to carry.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.groups: list[_Group] = []
        self.late: list[LateExchange] = []

    @property
    def tables(self) -> set[int]:
        """Indices of the tables that some rank used."""
        return {table.index for group in self.groups for table in group.tables}

    def land(self) -> None:
        """Waits for what comes now, and adds it to ``grad``."""
        for group in self.groups:
            blocks = unpack(group.handle.wait(), group.tables, group.counts, group.rank, group.wanted)
            for table in group.tables:
                places = [(r, table.index) for r in range(self._world_size)]
                placed = [_placed(table, group.ids[p], group.pooled[p], blocks[p]) for p in places if blocks[p]]
                self._add(table, [part for parts in placed for part in parts])

    def _add(self, table: ShardedTable, parts: list[tuple[Tensor, Tensor]]) -> None:
        """Sums the ranks' rows, averages as DDP does and accumulates into the parameter's ``grad``."""
        parameter = table.parameter
        if table.sparse:
            grad = average(table, parts, self._world_size)
            parameter.grad = grad if parameter.grad is None else (parameter.grad + grad).coalesce()
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        for ids, grad_rows in parts:
            parameter.grad.index_add_(0, ids, grad_rows.to(parameter.dtype), alpha=1.0 / self._world_size)


def _placed(
    table: ShardedTable, ids_T: Tensor, pooled: list[PooledRequest], blocks: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Pairs one rank's gradient pieces with their row ids."""
    if blocks[0].shape[1] == 0:  # this rank owns no columns (D < N) and was never told the ids
        return [(ids_T[:0], blocks[0][:0])]
    placed = [(ids_T, blocks[0])]
    for request, grad_Bd in zip(pooled, blocks[1:]):
        placed.append((request.ids_L, request.row_gradients(grad_Bd.to(table.parameter.dtype))))
    return placed


def _pooled(table: ShardedTable, rank: int, field: _Field) -> list[PooledRequest]:
    """The pooled requests of a rank that received a gradient."""
    return [request for k, request in enumerate(table.asked_pooled[rank]) if field.pooled_bits >> k & 1]
