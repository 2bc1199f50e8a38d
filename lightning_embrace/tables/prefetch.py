"""Brings the rows of a known batch into the windows, all tables in one exchange, before the first look-up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_embrace.comm.base import Communicator, Handle
from lightning_embrace.tables.table import ShardedTable

#: by table index, what one rank wants of it
Wants = dict[int, Tensor]


class RowExchange:
    """Rows on their way to the ranks that want them: AlltoAll (1) of the paper's section 4.1.

    Every rank knows what every other wants, so no request travels.

    Args:
        comm: Carries the exchange.
        tables: All sharded tables, by index.
        wants: By rank, the unique rows that it wants. Updates that are pending do not move them.
        what: The exchange's name.
        urgent: Dense gradients give way to it.

    Attributes:
        wants: As given.
    """

    def __init__(
        self, comm: Communicator, tables: list[ShardedTable], wants: Sequence[Wants], what: str, urgent: bool = True
    ) -> None:
        self._tables = tables
        self.wants = wants
        self._me = comm.rank
        pieces = [self._read(wanted) for wanted in wants]
        sizes = [self._sizes(wants[comm.rank], rank) for rank in range(comm.world_size)]
        self._sizes_by_rank = sizes
        send = torch.cat([p for piece in pieces for p in piece]) if any(pieces) else self._no_bytes(comm)
        self._handle: Handle = comm.all_to_all(
            send,
            [sum(p.numel() for p in piece) for piece in pieces],
            [sum(s) for s in sizes],
            "rows",
            what,
            urgent=urgent,
        )

    def land(self) -> None:
        """Waits, and puts the rows into the windows."""
        received = self._handle.wait()
        mine = self.wants[self._me]
        by_rank = [
            dict(zip(mine, piece.split(sizes)))
            for piece, sizes in zip(received.split([sum(s) for s in self._sizes_by_rank]), self._sizes_by_rank)
        ]
        for rank, wanted in enumerate(self.wants):
            for index, ids_U in wanted.items():
                if ids_U.numel():
                    self._tables[index].asked[rank].append(ids_U)
        for index, ids_U in mine.items():
            if ids_U.numel():
                table = self._tables[index]
                blocks = [
                    # a slice of received bytes may start anywhere, a view of wider elements may not: clone aligns it
                    by_rank[rank][index].clone().view(table.row_dtype).view(ids_U.numel(), table.widths[rank])
                    for rank in table.owners()
                ]
                table.window.add(ids_U, torch.cat(blocks, dim=1).to(table.parameter.dtype))

    def abandon(self) -> None:
        """Waits, and forgets the rows: they are not what the tables hold any more."""
        self._handle.wait()

    def _read(self, wanted: Wants) -> list[Tensor]:
        pieces = []
        for index, ids_U in wanted.items():
            table = self._tables[index]
            if table.widths[self._me] and ids_U.numel():
                pieces.append(table.read_settled(ids_U).to(table.row_dtype).view(-1).view(torch.uint8))
        return pieces

    def _sizes(self, wanted: Wants, rank: int) -> list[int]:
        """Bytes of each table that ``rank`` sends for these rows."""
        tables = [self._tables[index] for index in wanted]
        return [n.numel() * t.widths[rank] * t.row_dtype.itemsize for t, n in zip(tables, wanted.values())]

    @staticmethod
    def _no_bytes(comm: Communicator) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=comm.device)
