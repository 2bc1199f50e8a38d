"""The counted payload of every training step equals the paper's formula exactly, for rows, gradients, ids and headers.

With d_r columns on rank r, U_r unique rows looked up and T_r of them with a gradient: in the forward pass rank r sends
d_r·Σ_{s≠r} U_s elements and receives U_r·(D−d_r), in the backward pass it sends T_r·(D−d_r) and receives
d_r·Σ_{s≠r} T_s.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_embrace import EmbRaceStrategy
from lightning_embrace.comm.traffic import ring_bytes
from lightning_embrace.tables.headers import Header
from tests.exactness.models import Local
from tests.support.models import VOCABULARY, Bag, OneTable, TwoTables, batches
from tests.support.ranks import Ranks
from tests.support.training import train

STEPS = 5
ELEMENT, ID, FIELD, FLAG, SIZE = 8, 4, 8, 1, 4
#: header fields of the exchange that closes a backward pass, beside those of tables and (horizontal) dense blocks: two
#: that stop a run, and one on tables that were exchanged within the pass
STOP_FIELDS = 3
#: header fields of one table in it
CLOSING_FIELDS = 5


class Single(Local, OneTable):
    """No other collective within the step: the ranks would meet before it, in one more round."""


class Three(Local, TwoTables):
    """Likewise."""


class Bags(Local, Bag):
    """Likewise."""


class Step(NamedTuple):
    """What one rank counted in one step, by kind."""

    sent: dict[str, int]
    received: dict[str, int]
    calls: dict[str, int]


class Counter(Callback):
    """Keeps the counters of each batch."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        trainer.strategy.traffic.reset()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        traffic = trainer.strategy.traffic
        self.steps.append(Step(dict(traffic.sent), dict(traffic.received), dict(traffic.calls)))


def count(make: Callable[[], Any], world_size: int, shape: dict[str, int], **arguments: Any) -> list[Step]:
    """Runs in a worker."""
    data = [step[int(os.environ["LOCAL_RANK"])] for step in batches(STEPS, world_size, **shape)]
    counter = Counter()
    train(make, data, EmbRaceStrategy(tables=["*"], schedule="fifo"), world_size, callbacks=[counter], **arguments)
    return counter.steps


class Lookups(NamedTuple):
    """What the ranks look up in one table in one step."""

    unique: list[int]
    touched: list[int]


def unique(ids: list[Tensor], padding: int = -1) -> Lookups:
    found = [rank_ids.unique() for rank_ids in ids]
    return Lookups([u.numel() for u in found], [int((u != padding).sum()) for u in found])


def widths(columns: int, world_size: int) -> list[int]:
    parts = [part.numel() for part in torch.arange(columns).chunk(world_size)]
    return parts + [0] * (world_size - len(parts))


def vectors(tables: list[Lookups], columns: int, rank: int) -> dict[str, tuple[int, int]]:
    """The formula: bytes sent and received by kind."""
    d = widths(columns, len(tables[0].unique))[rank]
    rows_out = sum(d * (sum(t.unique) - t.unique[rank]) for t in tables)
    rows_in = sum(t.unique[rank] * (columns - d) for t in tables)
    grads_out = sum(t.touched[rank] * (columns - d) for t in tables)
    grads_in = sum(d * (sum(t.touched) - t.touched[rank]) for t in tables)
    return {"rows": (rows_out * ELEMENT, rows_in * ELEMENT), "grads": (grads_out * ELEMENT, grads_in * ELEMENT)}


def ids_of(tables: list[Lookups], columns: int, rank: int) -> tuple[int, int]:
    """Ids go once to each owner of columns, and a flag per row where some of a rank's rows received no gradient."""
    owns = [width > 0 for width in widths(columns, len(tables[0].unique))]

    def size(table: Lookups, of: int) -> int:
        return table.unique[of] * (ID + FLAG * (table.touched[of] < table.unique[of]))

    others = [r for r in range(len(owns)) if r != rank]
    sent = sum(size(t, rank) * owns[other] for t in tables for other in others)
    return sent, sum(size(t, other) * owns[rank] for t in tables for other in others)


def check(step: Step, expected: dict[str, tuple[int, int]]) -> None:
    for kind, (sent, received) in expected.items():
        assert (step.sent[kind], step.received[kind]) == (sent, received), kind


SIZES = [(1, 10), (2, 5), (2, 16), (3, 2), (3, 10), (3, 16)]


@pytest.mark.parametrize(("world_size", "columns"), SIZES, ids=lambda value: str(value))
def test_one_look_up(ranks: Callable[[int], Ranks], world_size: int, columns: int) -> None:
    data = batches(STEPS, world_size)
    counted = ranks(world_size).run(count, functools.partial(Single, columns, False, "sgd"), world_size, {})
    for rank in range(world_size):
        for number, step in enumerate(counted[rank]):
            if world_size == 1:
                assert step.sent == {}
                continue
            tables = [unique([batch["ids"] for batch in data[number]])]
            # the beginning, one look-up and END, then the closing header
            header = (3 * len(Header._fields) + CLOSING_FIELDS + STOP_FIELDS) * FIELD * (world_size - 1)
            # weight and bias of the head, and a flag for each
            dense = ring_bytes((3 * columns + 3 + 2) * ELEMENT, world_size)
            exact = {"ids": ids_of(tables, columns, rank), "header": (header, header), "dense": (dense, dense)}
            check(step, vectors(tables, columns, rank) | exact)
            assert step.sent.keys() == {"rows", "grads", *exact}


@pytest.mark.parametrize(("world_size", "columns"), [(2, 5), (3, 2), (3, 10)], ids=lambda value: str(value))
def test_three_look_ups_of_two_tables_with_padding(
    ranks: Callable[[int], Ranks], world_size: int, columns: int
) -> None:
    """A row that two look-ups share travels once each way, and the padding row's gradient does not travel."""
    data = batches(STEPS, world_size)
    counted = ranks(world_size).run(count, functools.partial(Three, columns, True, "adagrad"), world_size, {})
    for rank in range(world_size):
        for number, step in enumerate(counted[rank]):
            ids = [batch["ids"] for batch in data[number]]
            words = unique([torch.stack([i, (i + 3) % VOCABULARY]) for i in ids], padding=0)
            tables = [words, unique(ids, padding=1)]
            check(step, vectors(tables, columns, rank) | {"ids": ids_of(tables, columns, rank)})
            missing = [bool(torch.isin((i + 3) % VOCABULARY, i).logical_not().any()) for i in ids]
            rounds = 1 + 2 + any(missing) + 1
            header = (rounds * len(Header._fields) + 2 * CLOSING_FIELDS + STOP_FIELDS) * FIELD * (world_size - 1)
            check(step, {"header": (header, header)})
            assert step.calls["header"] == rounds + 1


def test_a_window_of_accumulation_fetches_a_row_once(ranks: Callable[[int], Ranks]) -> None:
    """The table does not change before the step: a row of an earlier batch is here, and gradients leave together."""
    world_size, columns, window = 3, 10, 2
    data = batches(STEPS, world_size)
    make = functools.partial(Single, columns, False, "sgd")
    counted = ranks(world_size).run(count, make, world_size, {}, accumulate_grad_batches=window)
    for rank in range(world_size):
        for first in range(0, STEPS, window):
            steps = counted[rank][first : first + window]
            ids = [torch.cat([step[r]["ids"] for step in data[first : first + window]]) for r in range(world_size)]
            for kind, (sent, received) in vectors([unique(ids)], columns, rank).items():
                assert sum(step.sent.get(kind, 0) for step in steps) == sent
                assert sum(step.received.get(kind, 0) for step in steps) == received
            assert ["grads" in step.sent for step in steps] == [False] * (len(steps) - 1) + [True]


@pytest.mark.parametrize(("world_size", "columns"), [(2, 5), (3, 16), (3, 10)], ids=lambda value: str(value))
def test_long_bags_travel_as_vectors(ranks: Callable[[int], Ranks], world_size: int, columns: int) -> None:
    """With B bags in place of U rows the formula stays: D elements per bag, each way."""
    shape = {"size": 2, "length": 40}
    make = functools.partial(Bags, columns, False, "sgd", rows=VOCABULARY)
    counted = ranks(world_size).run(count, make, world_size, shape)
    bags = Lookups([2] * world_size, [2] * world_size)
    ids = (80 * ID + 2 * SIZE) * (world_size - 1)
    for rank in range(world_size):
        for step in counted[rank]:
            check(step, vectors([bags], columns, rank) | {"ids": (ids, ids)})


class Total(Callback):
    """Keeps the counters of the whole fit, until the tables are gathered."""

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.step = Step(*(dict(getattr(trainer.strategy.traffic, kind)) for kind in Step._fields))


def count_all(make: Callable[[], Any], world_size: int, schedule: Any) -> Step:
    """Runs in a worker."""
    data = [step[int(os.environ["LOCAL_RANK"])] for step in batches(STEPS, world_size)]
    total = Total()
    train(make, data, EmbRaceStrategy(tables=["*"], schedule=schedule), world_size, callbacks=[total])
    return total.step


@pytest.mark.parametrize("schedule", ["2d", "horizontal", "vertical"])
@pytest.mark.parametrize(("world_size", "columns"), [(2, 5), (3, 10)], ids=lambda value: str(value))
def test_a_schedule_changes_when_and_not_how_much(
    ranks: Callable[[int], Ranks], world_size: int, columns: int, schedule: str
) -> None:
    """Early, other, prior and delayed rows together are the rows of the formula; no row travels twice."""
    data = batches(STEPS, world_size)
    make = functools.partial(Single, columns, False, "sgd")
    counted = ranks(world_size).run(count_all, make, world_size, schedule)
    for rank in range(world_size):
        tables = [unique([batch["ids"] for batch in step]) for step in data]
        per_step = [vectors([table], columns, rank) for table in tables]
        for kind in ("rows", "grads"):
            sent, received = (sum(step[kind][way] for step in per_step) for way in (0, 1))
            assert (counted[rank].sent[kind], counted[rank].received[kind]) == (sent, received), kind
