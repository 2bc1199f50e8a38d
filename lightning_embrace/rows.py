"""Where the look-ups of a sharded model get their rows: rounds in a training step, request and serve elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from lightning_embrace.comm.base import Communicator
from lightning_embrace.comm.serve import RowService
from lightning_embrace.tables.headers import Act, act_together
from lightning_embrace.tables.request import PooledRequest
from lightning_embrace.tables.rounds import LookupRounds
from lightning_embrace.tables.table import ShardedTable


class RowSource:
    """Answers look-ups (a :class:`~lightning_embrace.tables.lookup.Source`), and knows the versions of the tables.

    Args:
        comm: Carries the exchanges.
        shown: What a state dict holds for a table.
    """

    def __init__(self, comm: Communicator, shown: Callable[[ShardedTable], Tensor]) -> None:
        self._comm = comm
        self._shown = shown
        self.tables: list[ShardedTable] = []
        self._rounds = LookupRounds(comm, self.tables)
        self.service: RowService | None = None
        #: counts the changes of the tables: optimizer steps and loaded weights, the same on every rank
        self.version = 0
        #: gradients are there, and the optimizer has not stepped
        self.update_pending = False
        #: somebody has changed or read a table's weight, told with the table
        self.when_touched: Callable[[ShardedTable], None] = lambda _: None
        #: inside a step function of any kind: a sharded weight must not be read
        self.in_step = False
        #: look-ups run as rounds and collect gradients
        self.in_training_step = False
        #: look-ups are those of activation checkpointing, whose rows are here
        self.in_backward = False
        #: tables whose rows were brought to all ranks before the look-ups of this step
        self.planned: frozenset[int] = frozenset()
        #: tables of whose rows not all were here, in this step
        self.missed: set[int] = set()
        self.released = False
        self._forward_is_open = False

    # ---- for the session -----------------------------------------------------------------------------------------

    def await_ranks(self) -> None:
        """This rank is about to wait for the others, and changes no table until they come."""
        self._tell_service(True)

    def open_rounds(self, step: int, planned: Iterable[int] = ()) -> None:
        """Look-ups run as rounds from here on.

        Args:
            step: The step's number, for errors.
            planned: Tables whose rows were brought to all ranks beforehand.
        """
        self.planned = frozenset(planned)
        self._rounds.begin_step(step, self.version)
        self.missed.clear()
        self._tell_service(True)
        self.in_training_step = True

    def leave_forward(self, plan: int) -> None:
        """No more look-ups: tells the others. :meth:`close_rounds` follows.

        Args:
            plan: Fingerprint of what this rank will AllReduce next.
        """
        if self.in_training_step:
            self._rounds.leave(plan)
            self._forward_is_open, self.in_training_step = True, False

    def close_rounds(self) -> bool:
        """Answers the others until all have left their forward pass. Collective.

        Returns:
            Whether there was anything to close.
        """
        if not self._forward_is_open:
            return False
        self._forward_is_open = False
        self._rounds.finish()
        self._tell_service(False)
        return True

    def drop_rounds(self) -> None:
        """There was no batch to look up."""
        self._rounds.open = self.in_training_step = False
        self._tell_service(False)

    def meet(self) -> None:
        """Call before any other collective: inside a training step the ranks' look-ups come first."""
        if self.in_training_step and not self.in_backward:
            self._rounds.meet()

    def step_is_skipped(self) -> None:
        """No rank's optimizer will step any more on the gradients that are there."""
        self.update_pending = False

    def advance(self) -> None:
        """The tables have changed, alike on every rank."""
        self.version += 1
        self.update_pending = False
        if self.service is not None:
            self.service.advance()

    def reader(self) -> Callable[[int, Tensor], Tensor]:
        """What another thread reads this rank's columns with; on CUDA it keeps the order of this thread's work."""
        device = self._comm.device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def read(table: int, ids_U: Tensor) -> Tensor:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                return self.tables[table].read(ids_U.to(device)).cpu()

        return read

    def release(self) -> None:
        """Training has ended: whatever reads the tables says so."""
        self.released = True
        self.in_step = self.in_training_step = self.in_backward = False

    def _tell_service(self, in_rounds: bool) -> None:
        if self.service is not None:
            self.service.in_rounds(in_rounds)

    # ---- for the look-ups (tables.lookup.Source) -----------------------------------------------------------------

    def agree(self, act: Act, words: Sequence[int]) -> list[list[int]]:
        """Tells every rank some words, wherever in a step. Collective.

        Args:
            act: What this rank does.
            words: As many on every rank.

        Returns:
            Every rank's words.
        """
        self.meet()
        return act_together(self._comm, act, words)

    def fetch_rows(self, table: ShardedTable, ids_U: Tensor) -> Tensor:
        """Rows of unique valid ids in full width, [U, D]."""
        self.check_alive(table)
        if self.in_training_step:
            self.missed.add(table.index)
            return self._rounds.fetch_rows(table, ids_U)
        own = table.read(ids_U)
        if self.service is None:
            return own
        if self.update_pending:
            raise RuntimeError(
                f"A look-up in table {table.name!r} was made between backward and the optimizer's step, where other"
                " ranks may have stepped already. Make it in `training_step` or in `on_train_batch_end`."
            )
        blocks = self.service.fetch(table.index, table.name, ids_U.cpu(), table.widths, table.parameter.dtype)
        blocks[self._comm.rank] = own
        return torch.cat([blocks[r].to(own.device) for r in table.owners()], dim=1)

    def fetch_nothing(self, table: ShardedTable) -> None:
        """Answers the others, where a look-up needs nothing of them."""
        if table.index not in self.planned:  # else nobody has to ask
            self._rounds.join()

    def fetch_pooled(self, table: ShardedTable, request: PooledRequest) -> Tensor:
        """Sums or means of bags in full width, [B, D]."""
        self.missed.add(table.index)
        return self._rounds.fetch_pooled(table, request)

    def refuse(self, table: ShardedTable, bad_id: int) -> None:
        """Raises IndexError; in a training step on every rank at once."""
        if self.in_training_step and not self.in_backward:
            self._rounds.refuse(table, bad_id)
        self._rounds.raise_bad_id(self._comm.rank, table, bad_id)

    @contextmanager
    def changing(self, table: ShardedTable) -> Iterator[None]:
        """A table's weights are loaded anew inside."""
        self.check_alive(table)
        if self.service is not None:
            self.service.change()
        table.settle()
        yield
        table.forget()
        self.when_touched(table)
        self.advance()

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Inside, all ranks change weights of any tables alike: to look them up, not to train them. Collective."""
        act_together(self._comm, Act.AVERAGES)  # a rank that is behind may look up what is to be changed
        if self.service is not None:
            self.service.change()
        for table in self.tables:
            self.check_alive(table)
            table.settle()
        yield
        # what a window holds stays: gradients are accumulated there, and its rows are those of the weights from before
        for table in self.tables:
            self.when_touched(table)
        self.advance()

    def shown(self, table: ShardedTable) -> Tensor:
        """What a state dict holds for a table."""
        self.check_alive(table)
        return self._shown(table)

    def check_alive(self, table: ShardedTable) -> None:
        """Raises when training has ended with an exception and left the table sharded."""
        if self.released:
            raise RuntimeError(
                f"Table {table.name!r} is still sharded: the last fit ended with an exception and nothing was gathered"
                " after it. Build the model anew and load its last checkpoint."
            )
