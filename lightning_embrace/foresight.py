"""What follows from knowing the next batch: rows that are there before they are looked up, and gradients in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_embrace.aside import Aside
from lightning_embrace.comm.base import Communicator
from lightning_embrace.monitor.timeline import Profiled, Recorder
from lightning_embrace.optim.split import splits, touches_all_rows
from lightning_embrace.tables.ahead import Ahead, Outlook
from lightning_embrace.tables.delayed import LateExchange
from lightning_embrace.tables.prefetch import RowExchange, Wants
from lightning_embrace.tables.split import early_rows, without
from lightning_embrace.tables.table import ShardedTable


class Known(NamedTuple):
    """What one rank knows of its next batch.

    Attributes:
        ids: By table, what it looks up, unique and valid, or more; None where that is not known.
        word: For the other ranks' loaders, see :meth:`~lightning_embrace.lookahead.ahead.Lookahead.word`.
    """

    ids: Sequence[Tensor | None]
    word: int = 0


class Caution(NamedTuple):
    """What one rank has to fear; one is enough for all.

    Attributes:
        whole: Something may see a gradient that is not whole.
        disturbed: Rows may move that a step has not looked up.
    """

    whole: bool
    disturbed: bool


class Foresight:
    """Carries one step's plan into the next.

    Args:
        comm: Carries the exchanges.
        tables: All sharded tables, by index.
        vertical: Gradients come in parts and rows early, see `tables.split`; else whole and together.
        recorder: Gets to know what runs when.
    """

    def __init__(
        self, comm: Communicator, tables: list[ShardedTable], vertical: bool, recorder: Recorder | None = None
    ) -> None:
        self._comm = comm
        self._tables = tables
        self._vertical = vertical
        self._recorder = recorder or Profiled()
        # D < N: ranks without columns do not know what the others have, and must not decide by it
        self._narrow = any(0 in table.widths for table in tables)
        self._ahead = Ahead(comm, tables)
        self._plan = self._ahead.nothing
        self._aside: Aside | None = None
        self._early: RowExchange | None = None
        self._delayed: dict[int, Tensor] = {}
        #: tables whose rows were brought before the look-ups of this step
        self.planned: list[int] = []
        #: this rank's tables may have been changed by somebody since the early rows were read
        self.moved = False
        #: what a step's rows were: prior and delayed gradient rows; rows that came early, or early in vain; others
        self.counts = {"prior": 0, "delayed": 0, "early": 0, "in vain": 0, "rest": 0}

    @property
    def words(self) -> list[int]:
        """What the ranks said to each other's loaders when this step began."""
        return self._ahead.words

    def begin(self, known: Known, caution: Caution, optimizers: Iterable[Optimizer], step: int, version: int) -> None:
        """Begins a step: tells the others of the next batch and fetches the rows of this one. Collective.

        Args:
            known: What this rank knows of its next batch.
            caution: What it has to fear.
            optimizers: Those that train the tables.
            step: The step's number, for errors.
            version: How often the tables have changed.
        """
        self.plan_is_made()
        verdicts = verdicts_on(self._tables, optimizers)
        may_split = [verdict.whole is None and not caution.whole for verdict in verdicts]
        keeps = [verdict.keeps and not caution.disturbed for verdict in verdicts]
        self._ahead.tell(Outlook(known.ids, known.word, self.moved, may_split, keeps), step, version)
        self.moved = False
        early, self._early = self._early, None
        came = [early.wants[rank] if early is not None else {} for rank in range(self._comm.world_size)]
        wants = self._wants(lambda rank, t, ids: without(ids, [*t.asked[rank], came[rank].get(t.index, ids[:0])]))
        # at the same time as the header, which says nothing of these rows
        rest = self._exchange(wants, f"rows of step {step}", always=self._narrow)
        self._ahead.hear()
        came_early = _count(came[self._comm.rank])
        in_vain = came_early if self._ahead.moved else 0
        self.counts["early"], self.counts["in vain"] = came_early - in_vain, in_vain
        self.counts["rest"] = _count(wants[self._comm.rank]) + in_vain
        if early is not None and self._ahead.moved:
            early.abandon()
            early = RowExchange(self._comm, self._tables, early.wants, f"rows of step {step} that were early")
        for exchange in (early, rest):
            if exchange is not None:
                exchange.land()
        self.planned = [index for index, ids in enumerate(self._plan.ids) if ids is not None]
        self._plan = self._ahead.nothing

    def forward_is_over(self, synchronise: bool, then: Callable[[], None] | None = None) -> None:
        """No look-up needs other ranks any more: exchanges the ids of the next step. Collective.

        Beside backward, as soon as all ids are there, the next step's plan is made, and its rows that this step leaves
        alone are sent. Nothing else may be exchanged with high priority before :meth:`plan_is_made`.

        Args:
            synchronise: The optimizer steps after this backward pass.
            then: What else is to be exchanged beside backward, once the plan is there.
        """
        if self._ahead.ask():
            self._aside = Aside(partial(self._make_plan, synchronise, then), self._comm.device)

    def plan_is_made(self) -> None:
        """Waits for that."""
        aside, self._aside = self._aside, None
        if aside is not None:
            aside.end()

    def _make_plan(self, synchronise: bool, then: Callable[[], None] | None) -> None:
        self._recorder.in_background()
        self._plan = self._ahead.plan()
        if self._vertical and synchronise:
            self._send_early()
        if then is not None:
            then()

    def _send_early(self) -> None:
        touched = {t.index: _touched(t, self._comm.world_size) for t in self._tables if self._plan.ids[t.index]}
        none = torch.empty(0, dtype=torch.int64, device=self._comm.device)

        def chosen(_: int, table: ShardedTable, ids: Tensor) -> Tensor:
            if not self._ahead.keeps[table.index] or 0 in table.widths:
                # D < N: ranks without columns do not know what all looked up
                return ids[:0]
            return ids[early_rows(ids, touched[table.index], self._delayed.get(table.index, none))]

        wants = self._wants(chosen)
        self._early = self._exchange(wants, "early rows of the next step", urgent=False)

    def drain(self) -> None:
        """Waits for rows that were sent early; nobody will look them up."""
        early, self._early = self._early, None
        if early is not None:
            early.abandon()

    def check_early_rows(self) -> None:
        """Call before the optimizer steps where gradients may have been changed: rows that came early must not move."""
        for table, ids in [(self._tables[t], ids) for wants in self._early_wants() for t, ids in wants.items()]:
            if _moves(table.parameter.grad, ids):
                self.moved = True

    def _early_wants(self) -> Sequence[Wants]:
        return () if self._early is None else self._early.wants

    def next_rows(self) -> dict[int, Tensor]:
        """For tables whose gradient may come in parts, all rows that any rank looks up in the next step."""
        if not self._vertical:
            return {}
        unions = {t.index: self._plan.union(t.index) for t in self._tables if self._ahead.splits[t.index]}
        return {index: union for index, union in unions.items() if union is not None}

    def closed(self, exchanges: Iterable[LateExchange], touched: int) -> None:
        """The gradients of this step have been exchanged, but for these, out of so many rows of this rank."""
        parts = [part for exchange in exchanges for part in exchange.parts]
        self.counts["delayed"] = sum(part.ids[self._comm.rank].numel() for part in parts)
        self.counts["prior"] = touched - self.counts["delayed"]
        self._delayed = {part.table.index: torch.unique(torch.cat(part.ids)) for part in parts}

    def _exchange(self, wants: list[Wants], what: str, always: bool = False, urgent: bool = True) -> RowExchange | None:
        """Begins an exchange, where any rank wants anything."""
        wanted = always or any(map(_count, wants))
        return RowExchange(self._comm, self._tables, wants, what, urgent) if wanted else None

    def _wants(self, choose: Callable[[int, ShardedTable, Tensor], Tensor]) -> list[Wants]:
        """By rank, what it gets of the tables whose next ids all ranks know."""
        planned = [(t, ids) for t in self._tables if (ids := self._plan.ids[t.index]) is not None]
        return [{t.index: choose(rank, t, ids[rank]) for t, ids in planned} for rank in range(self._comm.world_size)]


class Verdict(NamedTuple):
    """What an optimizer's step does to a table.

    Attributes:
        whole: Why its update cannot come in parts; None where it can.
        keeps: Rows without gradient keep their weights.
    """

    whole: str | None
    keeps: bool


def verdicts_on(tables: list[ShardedTable], optimizers: Iterable[Optimizer]) -> list[Verdict]:
    """By table, what its optimizer's settings mean just now."""
    verdicts = [Verdict("no optimizer trains it", False)] * len(tables)
    table_of = {id(t.parameter): t for t in tables}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for index, sparse in [(t.index, t.sparse) for p in group["params"] if (t := table_of.get(id(p)))]:
                keeps = not touches_all_rows(optimizer, group, sparse)
                verdicts[index] = Verdict(splits(optimizer, group, sparse), keeps)
    return verdicts


def _moves(grad: Tensor | None, ids: Tensor) -> bool:
    """Whether some of these rows have a gradient."""
    if grad is None or ids.numel() == 0:
        return False
    if grad.is_sparse:
        return bool(torch.isin(ids, grad._indices()[0]).any())
    return bool(grad.index_select(0, ids).any())


def _count(wanted: Wants) -> int:
    return sum(ids.numel() for ids in wanted.values())


def _touched(table: ShardedTable, world_size: int) -> Tensor:
    """All rows that any rank has looked up since the table last changed."""
    parts = [table.asked_ids(rank) for rank in range(world_size)]
    parts += [request.ids_L for requests in table.asked_pooled for request in requests]
    rows: Tensor = torch.unique(torch.cat(parts))
    return rows
