"""A reference for what ``ddp`` cannot train: one process that plays all ranks.

Its loss is the mean of the ranks' losses, which is what averaging gradients means. Models take a list of batches for
it, see :class:`tests.exactness.models.Local`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lightning_embrace import EmbRaceStrategy
from tests.support.ddp import WORLD_SIZE, Data
from tests.support.ranks import Ranks
from tests.support.training import Outcome, assert_equal, outcome, train


def on_rank(make: Callable[[], Any], data: Data, tables: list[str], **arguments: Any) -> Outcome:
    """Runs in a worker."""
    batches = data(int(os.environ["LOCAL_RANK"]), WORLD_SIZE)
    return outcome(*train(make, batches, EmbRaceStrategy(tables=tables), WORLD_SIZE, **arguments))


def in_one_process(make: Callable[[], Any], data: Data, **arguments: Any) -> Outcome:
    by_rank = [data(rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
    return outcome(*train(make, [list(step) for step in zip(*by_rank)], "auto", **arguments))


def compare(
    ranks: Callable[[int], Ranks], make: Callable[[], Any], data: Data, tables: list[str], **arguments: Any
) -> list[Outcome]:
    """Asserts that parameters, states and each rank's losses are equal; returns what the ranks have."""
    plain = in_one_process(make, data, **arguments)
    outcomes = ranks(WORLD_SIZE).run(on_rank, make, data, tables, **arguments)
    for rank, ours in enumerate(outcomes):
        assert_equal(ours, plain._replace(losses=plain.losses[rank::WORLD_SIZE]))
    return outcomes
