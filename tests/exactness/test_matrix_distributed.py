"""N ranks equal one process on the concatenated batch, in fp64 to 1e-10 after 30 steps."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from lightning_embrace import EmbRaceStrategy
from tests.exactness.cases import MATRIX, Case
from tests.exactness.sample import SAMPLE
from tests.support.ranks import Ranks
from tests.support.training import assert_equal, on_rank, reference

STEPS = 30
STRATEGY = functools.partial(EmbRaceStrategy, tables=["*"])


def check(ranks: Callable[[int], Ranks], case: Case) -> None:
    make, world_size = case.make(), case.world_size
    plain = reference(make, STEPS, world_size)
    assert len(plain.losses) == STEPS
    for ours in ranks(world_size).run(on_rank, STRATEGY, make, STEPS, world_size):
        assert_equal(ours, plain)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_equals_one_process(ranks: Callable[[int], Ranks], case: Case) -> None:
    """Parameters, optimizer state and losses, for the sample of the matrix."""
    check(ranks, case)


@pytest.mark.matrix
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_equals_one_process_everywhere(ranks: Callable[[int], Ranks], case: Case) -> None:
    """The same for the full matrix."""
    check(ranks, case)
