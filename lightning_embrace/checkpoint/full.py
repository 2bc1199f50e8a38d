"""One file with whole tables, as ddp writes it, put together while it is written: no rank ever holds a whole table.

While the Trainer collects what is to be saved, tables and their optimizer states are holes (`hole`). Rank 0 then writes
the file without them, and calls for one after the other; each comes in pieces of rows and goes to its place in the
file. Where somebody reads values before the file is written, tables are gathered at once instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, BinaryIO

from torch import Tensor
from torch.optim import Optimizer

from lightning_embrace.checkpoint.agreement import Gather
from lightning_embrace.checkpoint.archive import write_archive
from lightning_embrace.checkpoint.atomic import written_whole
from lightning_embrace.checkpoint.filling import Room, fill
from lightning_embrace.checkpoint.hole import Hole
from lightning_embrace.comm.control import RankFailedError
from lightning_embrace.comm.torch_backend import ExchangeError
from lightning_embrace.shards import Shards
from lightning_embrace.tables.shard import gather_pieces
from lightning_embrace.tables.table import ShardedTable

#: writes content into an empty file, and returns its holes and where they belong
Writer = Callable[[BinaryIO, Any], list[tuple[Hole, Room]]]

_END = -1
_CURE = (
    "`trainer.strategy.full_state_dict()`, called on all ranks, has them now; an `on_save_checkpoint` hook or an"
    " overridden `state_dict` is given them."
)


class FullSave:
    """What one file is made of, from the first state dict to the last byte.

    Args:
        shards: The tables.
        reader: Who reads values before the file is written, None: nobody does. If so on any rank, tables are gathered.
        words: Tells a few words to all ranks, however long rank 0's disk takes in between.
    """

    def __init__(self, shards: Shards, reader: str | None, words: Gather) -> None:
        self._shards = shards
        self._words = words
        self._comm = shards.comm
        self._holes: list[tuple[ShardedTable, Tensor]] = []
        #: makes a hole, None where values are read
        self.leave = self._leave if reader is None else None

    @property
    def hollow(self) -> bool:
        """Whether there is something to fill, on every rank."""
        return bool(self._holes)

    def model_state(self) -> dict[str, Tensor]:
        """The model's state dict, with holes or with whole tables on rank 0. Collective."""
        return self._shards.full_state_dict(to_all=False, leave=self.leave)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, object]:
        """An optimizer's state dict, with holes or with whole states on rank 0. Collective."""
        return self._shards.full_optimizer_state(optimizer, to_all=False, leave=self.leave)

    def _leave(self, table: ShardedTable, part_Ud: Tensor, ids_U: Tensor | None = None) -> Hole:
        shape = table.rows, table.columns
        hole = Hole.of(table.name, _CURE, len(self._holes), shape, part_Ud.dtype, ids_U=ids_U)
        self._holes.append((table, part_Ud))
        return hole

    def write(self, content: Any, path: str, writer: Writer = write_archive) -> None:
        """Writes a file that has holes, and fills them. Collective.

        Args:
            content: What is to be saved; rank 0's counts.
            path: Where, on rank 0's machine.
            writer: Of the format.

        Raises:
            OSError: On rank 0: it could not be written. What was there before is as it was.
        """
        if self._comm.rank != 0:
            while (number := self._called(_END)) != _END:
                for _ in self._pieces(number):
                    pass
            return
        error: Exception | None = None
        try:
            with written_whole(path) as file:
                for hole, room in writer(file, content):
                    self._called(hole.number)
                    fill(file, room, self._pieces(hole.number))
        except (ExchangeError, RankFailedError):
            raise
        except Exception as caught:  # of this rank alone: the others wait for the next call
            error = caught
        self._called(_END)
        if error is not None:
            raise error

    def _called(self, number: int) -> int:
        """Rank 0 says which hole is filled next."""
        return int(self._words([number], "writing a checkpoint")[0][0])

    def _pieces(self, number: int) -> Any:
        return gather_pieces(self._comm, *self._holes[number])
