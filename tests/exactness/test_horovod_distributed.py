"""What is late and early under each schedule is so over Horovod too, and the numbers are those of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_embrace import EmbRaceStrategy
from tests.exactness import story as s
from tests.exactness.story import story
from tests.exactness.test_schedules_distributed import SCHEDULES, STEPS, assert_on, compare
from tests.support.models import TwoTables
from tests.support.ranks import Ranks
from tests.support.training import on_rank

pytestmark = pytest.mark.horovod
HOROVOD: dict[str, Any] = {"communication": "horovod"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(ranks: Callable[[int], Ranks], schedule: str) -> None:
    """Chunks, delayed and early rows travel when they should."""
    assert_on(compare(ranks, story("adam"), s.drawn(STEPS, 2), schedule, strategy=HOROVOD), schedule)


def test_it_learns_what_is_looked_up(ranks: Callable[[int], Ranks]) -> None:
    """`lookahead="auto"`, with a rank that has no samples and chunks of a few elements."""
    strategy = {**HOROVOD, "chunk_bytes": 64}
    seen = compare(ranks, story("adam"), s.with_empty(STEPS, 3), lookahead="auto", strategy=strategy)
    assert_on(seen, "2d")


@pytest.mark.parametrize("wire_dtype", ["bf16", "fp16"])
def test_half_the_bytes(ranks: Callable[[int], Ranks], wire_dtype: str) -> None:
    """Rows in 16 bits, one kind of which Horovod does not know: the numbers are those that torch.distributed gives."""
    make = functools.partial(TwoTables, 10, False, "sgd", True)
    theirs, ours = (
        ranks(2).run(
            on_rank,
            functools.partial(EmbRaceStrategy, tables=["*"], wire_dtype=wire_dtype, communication=communication),
            make,
            6,
            2,
        )
        for communication in ("torch", "horovod")
    )
    for a, b in zip(theirs, ours):
        assert a.losses == b.losses and a.sent == b.sent
        for key, value in a.state.items():
            torch.testing.assert_close(b.state[key], value, rtol=0, atol=0)
