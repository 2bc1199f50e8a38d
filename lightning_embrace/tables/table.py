"""One column-sharded table: its shard, the rows fetched for this step, and what the others asked of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_embrace.tables.columns import column_ranges
from lightning_embrace.tables.request import PooledRequest
from lightning_embrace.tables.window import Window


class ShardedTable:
    """A table split column-wise (paper, section 4.1): every rank keeps all V rows of its own d columns.

    Args:
        index: The table's number, the same on every rank.
        name: Name of its first module, for messages.
        parameter: The user's Parameter; its data becomes this rank's shard [V, d].
        sparse: The gradient is a sparse tensor, as ``nn.Embedding(sparse=True)`` has it.
        columns: D, the columns of the whole table.
        rank: This process' rank.
        world_size: Number of ranks.
        wire_dtype: dtype of rows and gradients on the wire; ``None`` keeps the table's, which is exact.
    """

    def __init__(
        self,
        index: int,
        name: str,
        parameter: nn.Parameter,
        sparse: bool,
        columns: int,
        rank: int,
        world_size: int,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.sparse = sparse
        self.rows = parameter.shape[0]
        self.columns = columns
        self.ranges = column_ranges(columns, world_size)
        self.widths = [stop - start for start, stop in self.ranges]
        self.rank = rank
        self.wire_dtype = wire_dtype
        self.asked: list[list[Tensor]] = [[] for _ in range(world_size)]
        self.asked_pooled: list[list[PooledRequest]] = [[] for _ in range(world_size)]
        self.window = Window(parameter.new_empty(0, columns, requires_grad=False))
        #: what is looked up, where somebody wants to know
        self.noted: list[Tensor] | None = None
        #: ids that the look-ups of training steps were given, and how many different ones each was given
        self.looked_up = self.unique = 0
        #: applies the update that is pending for the table, if there is one
        self.settle: Callable[[], None] = lambda: None
        #: called in backward when it reaches a look-up
        self.reached: Callable[[], None] = lambda: None
        #: called in backward when it has brought a look-up's gradient
        self.collected: Callable[[], None] = lambda: None

    @property
    def shard_Vd(self) -> Tensor:
        """This rank's columns, detached."""
        self.settle()
        return self.parameter.detach()

    @property
    def row_dtype(self) -> torch.dtype:
        """Dtype of rows and gradients on the wire."""
        return self.wire_dtype or self.parameter.dtype

    @property
    def id_dtype(self) -> torch.dtype:
        """Dtype of ids on the wire."""
        return torch.int32 if self.rows <= torch.iinfo(torch.int32).max else torch.int64

    def owners(self) -> list[int]:
        """Ranks that own columns; with D < N not all do."""
        return [r for r, width in enumerate(self.widths) if width > 0]

    def read(self, ids_U: Tensor) -> Tensor:
        """This rank's columns of some rows, [U, d]."""
        return self.shard_Vd.index_select(0, ids_U)

    def read_settled(self, ids_U: Tensor) -> Tensor:
        """The same for rows that no pending update will move."""
        return self.parameter.detach().index_select(0, ids_U)

    def forget(self) -> None:
        """The rows have changed (optimizer step, loaded checkpoint): fetched ones are stale."""
        self.asked = [[] for _ in self.ranges]
        self.asked_pooled = [[] for _ in self.ranges]
        # on the shard's device, which is not the one where the whole table was
        self.window = Window(self.parameter.new_empty(0, self.columns, requires_grad=False))

    def asked_ids(self, rank: int) -> Tensor:
        """All ids that ``rank`` asked for since :meth:`forget`, in its order, [U] int64."""
        parts = self.asked[rank]
        if not parts:
            return torch.empty(0, dtype=torch.int64, device=self.parameter.device)
        if len(parts) > 1:
            self.asked[rank] = parts = [torch.cat(parts)]
        return parts[0]
