"""N ranks equal one process on the concatenated batch, in fp64 to 1e-10 after 30 steps."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from lightning_embrace import EmbRaceStrategy
from tests.exactness.cases import MATRIX, Case
from tests.exactness.sample import SAMPLE
from tests.support.ranks import Ranks
from tests.support.training import Outcome, assert_equal, on_rank, reference

STEPS = 30


@functools.lru_cache(maxsize=1)
def plain(case: Case) -> Outcome:
    """The numbers of one process, whatever the schedule."""
    return reference(case.make(), STEPS, case.world_size)


def check(ranks: Callable[[int], Ranks], case: Case) -> None:
    theirs = plain(case._replace(schedule="fifo"))
    assert len(theirs.losses) == STEPS
    strategy = functools.partial(EmbRaceStrategy, tables=["*"], schedule=case.schedule)
    for ours in ranks(case.world_size).run(on_rank, strategy, case.make(), STEPS, case.world_size):
        assert_equal(ours, theirs)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_equals_one_process(ranks: Callable[[int], Ranks], case: Case) -> None:
    """Parameters, optimizer state and losses, for the sample of the matrix."""
    check(ranks, case)


@pytest.mark.matrix
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_equals_one_process_everywhere(ranks: Callable[[int], Ranks], case: Case) -> None:
    """The same for the full matrix."""
    check(ranks, case)
