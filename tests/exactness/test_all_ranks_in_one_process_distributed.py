"""N ranks equal one process that plays them all, for what Lightning's ``ddp`` cannot train."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.exactness.models import Branches, Unfrozen, Unsynchronized
from tests.exactness.test_ddp_distributed import uses
from tests.support.all_ranks import compare, on_rank
from tests.support.ddp import WORLD_SIZE, even
from tests.support.ranks import Ranks, RemoteError


@pytest.mark.parametrize("tables", [["*"], ["!*"]], ids=["sharded", "replicated"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_sparse_tables_that_few_ranks_use(ranks: Callable[[int], Ranks], optimizer: str, tables: list[str]) -> None:
    """A table without look-ups has no gradient on that rank; the ranks that have one decide."""
    data = uses((1, 2, 4), (7, 0, 0), (0, 0, 0), (0, 0, 3), (4, 4, 4), (0, 7, 7))
    compare(ranks, functools.partial(Branches, optimizer, True), data, tables)


@pytest.mark.parametrize("tables", [["*"], ["table"], ["!*"]], ids=["sharded", "one sharded", "replicated"])
def test_parts_frozen_and_unfrozen_during_training(ranks: Callable[[int], Ranks], tables: list[str]) -> None:
    """As fine-tuning callbacks do it. ddp does not see parameters that are unfrozen later: they drift apart."""
    compare(ranks, functools.partial(Unfrozen, "adamw"), functools.partial(even, steps=3), tables, max_epochs=4)


def test_a_backward_pass_behind_lightning_s_back_is_told(ranks: Callable[[int], Ranks]) -> None:
    """`loss.backward()` leaves the rows' gradients on their rank: the table would silently not be trained."""
    make = functools.partial(Unsynchronized, "adam")
    with pytest.raises(RemoteError, match=r"gradients of table.* have not been synchronised.*self\.manual_backward"):
        ranks(WORLD_SIZE).run(on_rank, make, even, ["*"])
