"""N ranks equal one process on the concatenated batch, in fp64 to 1e-10 after 30 steps."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from lightning_embrace import EmbRaceStrategy
from lightning_embrace.config import Communication
from tests.exactness.cases import MATRIX, Case
from tests.exactness.sample import HOROVOD_SAMPLE, SAMPLE
from tests.support.ranks import Ranks
from tests.support.training import Outcome, assert_equal, on_rank, reference

STEPS = 30
HOROVOD_STEPS = 10


@functools.lru_cache(maxsize=1)
def plain(case: Case, steps: int) -> Outcome:
    """The numbers of one process, whatever the schedule."""
    return reference(case.make(), steps, case.world_size)


def check(
    ranks: Callable[[int], Ranks], case: Case, steps: int = STEPS, communication: Communication = "torch"
) -> None:
    theirs = plain(case._replace(schedule="fifo"), steps)
    assert len(theirs.losses) == steps
    strategy = functools.partial(EmbRaceStrategy, tables=["*"], schedule=case.schedule, communication=communication)
    for ours in ranks(case.world_size).run(on_rank, strategy, case.make(), steps, case.world_size):
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


@pytest.mark.horovod
@pytest.mark.parametrize("case", HOROVOD_SAMPLE, ids=str)
def test_equals_one_process_over_horovod(ranks: Callable[[int], Ranks], case: Case) -> None:
    """The same where Horovod carries the exchanges: every schedule with every kind of table, in fewer steps."""
    check(ranks, case, HOROVOD_STEPS, "horovod")


@pytest.mark.horovod
@pytest.mark.matrix
@pytest.mark.parametrize("case", [c for c in MATRIX if c.world_size > 1], ids=str)
def test_equals_one_process_over_horovod_everywhere(ranks: Callable[[int], Ranks], case: Case) -> None:
    """The same for the full matrix. Horovod's own thread makes a step several times as dear as with torch."""
    check(ranks, case, HOROVOD_STEPS, "horovod")
