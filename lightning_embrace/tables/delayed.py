"""Gradient rows that nobody looks up in the next step: they travel when the wire is free (paper, section 4.2.2)."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from lightning_embrace.comm.base import Communicator, Handle
from lightning_embrace.comm.queue import Slot
from lightning_embrace.tables.packing import Counts, average, unpack
from lightning_embrace.tables.table import ShardedTable


class DelayedRows:
    """The delayed rows of one table; an update that is applied late, see `schedule.pending`.

    Args:
        table: The table.
        ids: By (rank, table index), the delayed rows that each rank sends.
        world_size: N.
    """

    #: the prior rows, if only none of them, have gone through the optimizer's step
    counted = True

    def __init__(self, table: ShardedTable, ids: Mapping[tuple[int, int], Tensor], world_size: int) -> None:
        self.table = table
        self.parameters: list[nn.Parameter] = [table.parameter]
        self.ids = [ids[r, table.index] for r in range(world_size)]
        self.exchange: LateExchange | None = None

    def gradients(self) -> list[Tensor | None]:
        """Waits for the rows; the averaged gradient of the shard, sparse."""
        assert self.exchange is not None
        table, blocks = self.table, self.exchange.blocks()
        # a rank without columns (D < N) was never told the others' ids
        arrived = [(i, blocks[r, table.index][0]) for r, i in enumerate(self.ids)]
        pairs = [(i, block) for i, block in arrived if i.numel() == len(block)]
        return [average(table, pairs, len(self.ids))]


class LateExchange:
    """The delayed rows of all tables of one wire dtype in one exchange.

    Args:
        comm: Carries it.
        send: What this rank sends.
        sends: Elements to each rank.
        wanted: Elements from each rank.
        parts: The tables' parts.
        counts: Rows, by rank and table.
    """

    def __init__(
        self,
        comm: Communicator,
        send: Tensor,
        sends: Sequence[int],
        wanted: Sequence[int],
        parts: list[DelayedRows],
        counts: Counts,
    ) -> None:
        self._comm = comm
        self._send, self._sends, self._wanted = send, sends, wanted
        self.parts = parts
        self._counts = counts
        self._what = f"delayed gradient rows of {', '.join(part.table.name for part in parts)}"
        self.slot = Slot(self._issue, self._what, alone=True)
        self._blocks: dict[tuple[int, int], list[Tensor]] | None = None
        self._lock = threading.Lock()
        for part in parts:
            part.exchange = self

    def blocks(self) -> dict[tuple[int, int], list[Tensor]]:
        """Waits for the rows, by (rank, table index)."""
        with self._lock:
            if self._blocks is None:
                tables = [part.table for part in self.parts]
                self._blocks = unpack(self.slot.wait(), tables, self._counts, self._comm.rank, self._wanted)
            return self._blocks

    def _issue(self) -> Handle:
        return self._comm.all_to_all(self._send, self._sends, self._wanted, "grads", self._what, low_priority=True)
