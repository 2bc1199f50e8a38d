"""Gradients of tables that travel in the middle of backward: the numbers of one process, whatever comes afterwards."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_embrace.tables import midway
from lightning_embrace.tables.midway import Closed, TableGradients
from tests.exactness import story as s
from tests.exactness.story import Seen, Story, story
from tests.exactness.test_schedules_distributed import right
from tests.support.ranks import Ranks
from tests.support.training import assert_equal, train

#: by table index
WORDS, BAGS = 0, 1


class Output(Story):
    """One table is looked up last, and backward reaches it first."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.body(torch.tanh(self.words(batch["ids"]).sum(1)))
        return ((x.sum(1, keepdim=True) * self.bags(batch["more"])).mean(1) - batch["target"]).square().sum()


class Once(Output):
    """On rank 1, every other step leaves the table out that comes first in backward."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if "leaves out" in batch:
            return (self.body(torch.tanh(self.words(batch["ids"]).sum(1))).mean(1) - batch["target"]).square().sum()
        return super().loss(batch)


class Again(Output):
    """In every other step backward comes back to a table that seemed to be complete: only then it is known of."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = torch.tanh(self.words(batch["ids"]).sum(1))
        if "again" in batch:
            x = x + checkpoint(self._repeated, batch["ids"], x, use_reentrant=True)
        x = self.body(x)
        return ((x.sum(1, keepdim=True) * self.bags(batch["more"])).mean(1) - batch["target"]).square().sum()

    def _repeated(self, ids: Tensor, x: Tensor) -> Tensor:
        session = getattr(getattr(self._trainer, "strategy", None), "_session", None)
        if torch.is_grad_enabled() and session is not None:  # in backward: not before the others have been sent
            until = time.monotonic() + 0.5
            while not session._gradients._before.groups and time.monotonic() < until:
                time.sleep(0.001)
        return x * torch.tanh(self.bags(ids))


class Broken(Output):
    """Backward fails on rank 1 when the fourth batch's table has been sent, or is waited for."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(batch)
        if self.global_step == 3 and os.environ.get("LOCAL_RANK") == "1":
            loss.register_hook(_fail)
        return loss


def _fail(_: Tensor) -> None:
    raise ValueError("no gradient today")


def on_rank(*arguments: Any, bytes_ahead: int = 0, **named: Any) -> tuple[Seen, list[set[int]], int]:
    """Runs in a worker; also by step, which tables were sent in the middle of backward; and what was not put off."""
    sent: list[set[int]] = []
    at_once = 0
    close = TableGradients.close

    def watched(self: TableGradients, *rows: Any) -> Closed:
        nonlocal at_once
        sent.append(self._before.tables)
        closed = close(self, *rows)
        at_once += len(closed.at_once)
        return closed

    with mock.patch.object(midway, "AHEAD_BYTES", bytes_ahead), mock.patch.object(TableGradients, "close", watched):
        return s.on_rank(*arguments, **named), sent, at_once


def compare(
    ranks: Callable[[int], Ranks], make: Callable[[], Any], data: s.Steps, schedule: str = "2d", bytes_ahead: int = 1
) -> tuple[list[set[int]], int]:
    """Asserts equal numbers; returns what rank 0 sent."""
    plain = s.in_one_process(make, data)
    strategy = {"schedule": schedule, "lookahead": right}
    seen = ranks(len(data[0])).run(on_rank, make, data, strategy, bytes_ahead=bytes_ahead)
    for rank, (ours, sent, _) in enumerate(seen):
        losses = plain.outcome.losses[rank :: len(data[0])]
        assert_equal(ours.outcome, plain.outcome._replace(losses=losses))
        assert sent == seen[0][1], "all ranks send the same"
    return seen[0][1:]


@pytest.mark.parametrize(
    ("optimizer", "sparse", "world_size", "columns", "schedule"),
    [
        ("adagrad", True, 2, 10, "2d"),
        ("adam", True, 3, 2, "2d"),
        ("torch adam", False, 2, 10, "vertical"),
        ("torch adagrad", True, 3, 10, "vertical"),
    ],
)
def test_equals_one_process(
    ranks: Callable[[int], Ranks], optimizer: str, sparse: bool, world_size: int, columns: int, schedule: str
) -> None:
    """The table that comes first is sent as soon as it is complete, the other one when the step closes."""
    make = story(optimizer, cls=Output, sparse=sparse, columns=columns)
    sent, _ = compare(ranks, make, s.drawn(8, world_size), schedule)
    assert {BAGS} in sent[:4] and sent.count({BAGS}) >= 4
    assert all(WORDS not in tables for tables in sent), "when it is complete, no dense gradient is still to come"


@pytest.mark.parametrize("schedule", ["fifo", "horizontal"])
def test_other_schedules_send_all_at_the_end(ranks: Callable[[int], Ranks], schedule: str) -> None:
    """They are controls of the benchmark."""
    sent, _ = compare(ranks, story("adam", cls=Output), s.drawn(5, 2), schedule)
    assert not any(sent)


def test_little_is_not_sent_alone(ranks: Callable[[int], Ranks]) -> None:
    """An exchange more costs latency."""
    sent, _ = compare(ranks, story("adam", cls=Output), s.drawn(5, 2), bytes_ahead=midway.AHEAD_BYTES)
    assert not any(sent)


def test_a_rank_without_samples(ranks: Callable[[int], Ranks]) -> None:
    """It has a gradient without rows."""
    sent, _ = compare(ranks, story("adagrad", cls=Output), s.with_empty(8, 3))
    assert {BAGS} in sent


def test_a_rank_that_leaves_the_table_out(ranks: Callable[[int], Ranks]) -> None:
    """It has nothing to wait for, and no gradient."""
    data = s.drawn(9, 2)
    for step in data[::2]:
        step[1]["leaves out"] = torch.ones(())
    compare(ranks, story("torch adagrad", cls=Once), data)


@pytest.mark.parametrize("optimizer", ["adagrad", "torch sgd"])
def test_what_comes_after_it_was_sent_is_added(ranks: Callable[[int], Ranks], optimizer: str) -> None:
    """Rows that were to be delayed get all of their gradient in one step: Adagrad would make something else of two."""
    data = s.drawn(9, 2)
    for step in data[4::4]:
        for batch in step:
            batch["again"] = torch.ones(())
    sent, at_once = compare(ranks, story(optimizer, cls=Again), data)
    assert {BAGS} in sent[4::4] and at_once > 0


def fails(make: Callable[[], Any], data: s.Steps) -> None:
    """Runs in a worker."""
    mine: Any = [step[int(os.environ["LOCAL_RANK"])] for step in data]
    from lightning_embrace import EmbRaceStrategy

    with mock.patch.object(midway, "AHEAD_BYTES", 1):
        train(make, mine, EmbRaceStrategy(tables=["*"], lookahead=right), len(data[0]))


def beside() -> list[str]:
    """Runs in a worker."""
    until = time.monotonic() + 10
    while any(t.name == "embrace-aside" for t in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.05)
    return [t.name for t in threading.enumerate()]


def test_a_backward_that_fails_leaves_no_thread_behind(ranks: Callable[[int], Ranks]) -> None:
    """The thread beside it would wait for gradients that never come."""
    pool = ranks(2)
    with mock.patch.object(pool, "stop"):  # as it is after a failure
        outcomes = pool.try_run(functools.partial(fails, story("adam", cls=Broken)), s.drawn(8, 2))
    assert not any(ok for ok, _ in outcomes)
    assert "no gradient today" in outcomes[1][1]
    assert "RankFailedError" in outcomes[0][1]
    names = pool.run(beside)
    pool.stop()
    assert all("embrace-aside" not in of_rank for of_rank in names)
