"""When the tables' gradients are exchanged: when a step closes, or beside backward where they are complete before.

The softmax's table of a language model has most of the rows and is the first thing that backward reaches; the table of
its input is the last. In which order a model's tables come is learned from the step before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_embrace.comm.base import Communicator
from lightning_embrace.tables.delayed import DelayedRows, LateExchange
from lightning_embrace.tables.gradients import Arriving, GradientExchange, Taken
from lightning_embrace.tables.headers import BITS
from lightning_embrace.tables.table import ShardedTable

#: bytes of dense gradients that are still to come when a table's gradient is complete, at least: with less, there is
#: not enough left of backward to pay for an exchange more
AHEAD_BYTES = 1 << 18


class Closed(NamedTuple):
    """What a step leaves to the next one.

    Attributes:
        late: Exchanges of delayed rows, which the low-priority queue is to carry.
        at_once: Those parts that must not be applied later than the step.
        touched: Rows of this rank that received a gradient.
    """

    late: list[LateExchange]
    at_once: list[DelayedRows]
    touched: int


class TableGradients:
    """Exchanges the gradients of all sharded tables, once a step.

    Which tables are sent in the middle of backward is agreed on by all ranks when the step before closes. Each rank
    sends what it has when they are complete. If that was not all of it, because the step went another way than the one
    before, the rest follows when the step closes: gradients add up.

    Args:
        comm: Carries the exchanges.
        tables: All sharded tables, by index.
        remaining: Bytes of dense gradients that backward has not brought yet.
    """

    def __init__(self, comm: Communicator, tables: list[ShardedTable], remaining: Callable[[], int]) -> None:
        self._comm = comm
        self._tables = tables
        self._exchange = GradientExchange(comm, tables)
        self._remaining = remaining
        # streams keep the order of one thread's work: there nothing runs beside backward
        self._possible = comm.world_size > 1 and comm.device.type != "cuda"
        #: tables that are tried in this step, the same on all ranks
        self._chosen: frozenset[int] = frozenset()
        self._completed: set[int] = set()
        self._early: set[int] = set()
        self._go_on = threading.Event()
        #: what has been sent in the middle of backward, and what is sent when the step closes
        self._before = Arriving(comm.world_size)
        self._taken: list[Taken] = []
        self._touched = 0

    @property
    def header_size(self) -> int:
        """Number of header fields."""
        return 1 + self._exchange.header_size

    def begin(self) -> None:
        """Call before a backward pass, and before anything can call :meth:`run`."""
        self._completed, self._early = set(), set()
        self._go_on.clear()

    def collected(self, table: ShardedTable) -> None:
        """Backward has brought a look-up's gradient."""
        if table.window.waiting > 0:
            return
        if table.index in self._completed:  # it was thought so before
            self._early.discard(table.index)
            return
        self._completed.add(table.index)
        if self._remaining() >= AHEAD_BYTES:
            self._early.add(table.index)
        if self._completed >= self._chosen:
            self._go_on.set()

    def backward_is_over(self) -> None:
        """Call after it, well or badly: what is not complete by now is not waited for."""
        self._go_on.set()

    def run(self, next_rows: Callable[[], Mapping[int, Tensor]]) -> None:
        """Waits for the chosen tables and sends their gradients; in a thread beside backward. Collective.

        Args:
            next_rows: By table whose update may come in parts, all rows that any rank looks up in the next step.
        """
        if not self._chosen:
            return
        self._go_on.wait()
        taken = self._exchange.take(self._chosen)
        header = torch.tensor(self._exchange.header(taken))
        rows = self._comm.gather(header, "header of gradients that are complete").wait().tolist()
        self._touched += sum(part.touched for part in taken)
        self._before = self._exchange.start(taken, rows, next_rows())

    def header(self) -> list[int]:
        """This rank's part of the closing header; :meth:`close` follows."""
        self._taken = self._exchange.take()
        self._touched += sum(part.touched for part in self._taken)
        word = sum(1 << index for index in self._early if index < BITS) if self._possible else 0
        return [word, *self._exchange.header(self._taken)]

    def close(self, headers: list[list[int]], next_rows: Mapping[int, Tensor]) -> Closed:
        """Exchanges the rest and adds the averaged gradients to ``grad``. Collective.

        Args:
            headers: Every rank's :meth:`header`.
            next_rows: By table whose update may come in parts, all rows that any rank looks up in the next step.

        Returns:
            What is not there yet.
        """
        self._choose(row[0] for row in headers)
        # nothing of them stays in memory until the next step closes
        before, self._before = self._before, Arriving(self._comm.world_size)
        taken, self._taken = self._taken, []
        touched, self._touched = self._touched, 0
        # of a table that was sent before, rows may be delayed: what came after it must be added to them at once
        rest = {index: rows for index, rows in next_rows.items() if index not in before.tables}
        after = self._exchange.start(taken, [row[1:] for row in headers], rest)
        for arriving in (before, after):
            arriving.land()
        again = before.tables & after.tables
        at_once = [part for exchange in before.late for part in exchange.parts if part.table.index in again]
        return Closed([*before.late, *after.late], at_once, touched)

    def _choose(self, words: Iterable[int]) -> None:
        common = (1 << BITS) - 1
        for word in words:
            common &= word
        self._chosen = frozenset(index for index in range(len(self._tables)) if common >> index & 1)
