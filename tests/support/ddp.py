"""Runs a model under ``ddp`` and under ``embrace`` in the same worker processes, on the same batches."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_embrace import EmbRaceStrategy
from lightning_embrace.schedule import dense
from lightning_embrace.schedule.order import Name
from tests.support.models import batches
from tests.support.ranks import Ranks
from tests.support.training import Outcome, assert_equal, outcome, train

#: (rank, world size) → this rank's batches
Data = Callable[[int, int], list[Any]]
WORLD_SIZE = 3


class Comparison(NamedTuple):
    """One way to train, run under both strategies.

    Attributes:
        make: Builds the model.
        data: This rank's batches.
        tables: ``EmbRaceStrategy(tables=...)``.
        ddp: The strategy to compare with.
        arguments: For the Trainer.
        block_bytes: Size of the dense blocks, None: the default.
        world_size: N.
        tolerance: Largest absolute difference.
        schedule: ``EmbRaceStrategy(schedule=...)``.
    """

    make: Callable[[], Any]
    data: Data
    tables: str | Sequence[str] = ("*",)
    ddp: str = "ddp"
    arguments: dict[str, Any] = {}
    block_bytes: int | None = None
    world_size: int = WORLD_SIZE
    tolerance: float = 1e-10
    schedule: Name = "2d"


class Pair(NamedTuple):
    """What both strategies made of it on one rank."""

    theirs: Outcome
    ours: Outcome


def even(rank: int, world_size: int, steps: int = 6, **arguments: Any) -> list[dict[str, Tensor]]:
    """As many samples on each rank."""
    return [step[rank] for step in batches(steps, world_size, **arguments)]


def uneven(rank: int, world_size: int, steps: int = 6, empty_at: int | None = None) -> list[dict[str, Tensor]]:
    """More samples on higher ranks; in one step the last rank may have none."""
    data = [step[rank] for step in batches(steps, world_size, size=2 + 3 * rank, seed=7)]
    if empty_at is not None and rank == world_size - 1:
        data[empty_at] = {key: value[:0] for key, value in data[empty_at].items()}
    return data


def both(case: Comparison) -> Pair:
    """Runs in a worker."""
    rank = int(os.environ["LOCAL_RANK"])
    fit = functools.partial(train, case.make, case.data(rank, case.world_size), devices=case.world_size)
    theirs = outcome(*fit(strategy=case.ddp, **case.arguments))
    plan = dense.plan_blocks
    if case.block_bytes is not None:
        dense.plan_blocks = functools.partial(plan, block_bytes=case.block_bytes)  # type: ignore[assignment]
    try:
        tables = case.tables if isinstance(case.tables, str) else list(case.tables)
        ours = outcome(*fit(strategy=EmbRaceStrategy(tables=tables, schedule=case.schedule), **case.arguments))
    finally:
        dense.plan_blocks = plan
    return Pair(theirs, ours)


def compare(ranks: Callable[[int], Ranks], case: Comparison) -> list[Pair]:
    """Asserts on every rank that both strategies came to the same parameters, buffers, states and losses."""
    pairs = ranks(case.world_size).run(both, case)
    for pair in pairs:
        assert_equal(pair.ours, pair.theirs, case.tolerance)
    start = {k: v for k, v in case.make().state_dict().items()}
    assert any(not torch.equal(v, start[k]) for k, v in pairs[0].theirs.state.items()), "nothing was trained"
    return pairs
