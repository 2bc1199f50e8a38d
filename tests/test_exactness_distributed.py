"""Exactness: N ranks equal one process on the concatenated batch."""

from __future__ import annotations

import functools

import pytest

from lightning_embrace import EmbRaceStrategy
from tests.support.models import Bag, OneTable, TwoTables
from tests.support.training import assert_equal, on_rank, reference

STRATEGY = functools.partial(EmbRaceStrategy, tables=["*"])


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(OneTable, 10, False, "adam"),
        functools.partial(TwoTables, 10, True, "adagrad"),
        functools.partial(Bag, 16, False, "momentum"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equals_one_process(ranks, make, world_size):
    """The numbers are those of plain training."""
    plain = reference(make, 10, world_size)
    for ours in ranks(world_size).run(on_rank, STRATEGY, make, 10, world_size):
        assert_equal(ours, plain)
