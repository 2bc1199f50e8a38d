"""N ranks equal N ranks of Lightning's own ``ddp``, where one process on the concatenated batch would differ."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.exactness.models import (
    AccumulatedByHand,
    Adversaries,
    Bags,
    Branches,
    Groups,
    MixedDtypes,
    NextWord,
    Normalized,
    NormalizedByHand,
    OnlyRead,
    OnlyTable,
    PartlyFrozen,
    TwoLosses,
    Words,
)
from tests.support.ddp import Comparison, compare, even, uneven
from tests.support.ranks import Ranks

UNUSED = "ddp_find_unused_parameters_true"


def uses(*by_step: tuple[int, int, int]):  # type: ignore[no-untyped-def]
    """Batches that say which parts they use, per step and rank."""
    return functools.partial(_using, by_step)


def _using(by_step: tuple[tuple[int, int, int], ...], rank: int, world_size: int):  # type: ignore[no-untyped-def]
    data = even(rank, world_size, steps=len(by_step))
    return [{**batch, "uses": bits[rank]} for batch, bits in zip(data, by_step)]


CASES = {
    "unequal batches, dense": Comparison(functools.partial(Words, "adam"), uneven),
    "unequal batches, sparse": Comparison(functools.partial(Words, "adagrad", True), uneven),
    "sums": Comparison(functools.partial(Words, "momentum", reduction="sum"), uneven),
    "sums and an empty batch": Comparison(
        functools.partial(Words, "adamw", reduction="sum"), functools.partial(uneven, empty_at=2)
    ),
    "sums and an empty batch, sparse": Comparison(
        functools.partial(Words, "sgd", True, reduction="sum"), functools.partial(uneven, empty_at=2)
    ),
    "ignored targets": Comparison(functools.partial(NextWord, "adam"), even),
    "ignored targets, sparse": Comparison(functools.partial(NextWord, "sgd", True), even),
    "scale_grad_by_freq": Comparison(functools.partial(Words, "adam", scale_grad_by_freq=True), uneven),
    "scale_grad_by_freq and padding": Comparison(
        functools.partial(Words, "sgd", scale_grad_by_freq=True, padding_idx=2), even
    ),
    "scale_grad_by_freq in sums of bags": Comparison(
        functools.partial(Bags, "sgd", mode="sum", scale_grad_by_freq=True), even
    ),
    "scale_grad_by_freq in means of bags": Comparison(
        functools.partial(Bags, "adam", mode="mean", scale_grad_by_freq=True), uneven
    ),
    "batch norm and a moving average": Comparison(functools.partial(Normalized, "adam"), even),
    "batch norm while accumulating": Comparison(
        functools.partial(Normalized, "adam"), even, arguments={"accumulate_grad_batches": 2}
    ),
    "batch norm by hand": Comparison(functools.partial(NormalizedByHand, "adam"), even),
    "accumulation with an incomplete end": Comparison(
        functools.partial(Words, "adamw"),
        functools.partial(even, steps=8),
        arguments={"accumulate_grad_batches": 3, "max_epochs": 2},
    ),
    "accumulation with an incomplete end, sparse": Comparison(
        functools.partial(Words, "adagrad", True, padding_idx=0),
        functools.partial(even, steps=8),
        arguments={"accumulate_grad_batches": 3, "max_epochs": 2},
    ),
    "accumulation of pooled bags": Comparison(
        functools.partial(Bags, "adam", mode="sum"),
        functools.partial(even, steps=5),
        arguments={"accumulate_grad_batches": 2},
    ),
    "one rank alone uses a part": Comparison(
        functools.partial(Branches, "adamw"), uses((1, 2, 4), (7, 0, 0), (0, 0, 3), (4, 4, 4), (0, 7, 7)), ddp=UNUSED
    ),
    "other ranks use other parts, in many blocks": Comparison(
        functools.partial(Branches, "adamw"), uses((1, 2, 4), (7, 0, 0), (0, 5, 2)), ddp=UNUSED, block_bytes=100
    ),
    "no rank uses a part": Comparison(
        functools.partial(Branches, "adamw"), uses((0, 0, 0), (1, 1, 1), (0, 0, 0), (5, 1, 4), (0, 0, 0)), ddp=UNUSED
    ),
    "parts unused while accumulating": Comparison(
        functools.partial(Branches, "adamw"),
        uses((1, 0, 0), (0, 0, 0), (0, 2, 0), (2, 0, 0), (0, 0, 4)),
        ddp=UNUSED,
        arguments={"accumulate_grad_batches": 2},
    ),
    "frozen parts": Comparison(functools.partial(PartlyFrozen, "adamw"), even),
    "two optimizers, toggled": Comparison(Adversaries, even, ddp=UNUSED),
    "two optimizers": Comparison(functools.partial(Adversaries, False), even, ddp=UNUSED),
    "two backward passes": Comparison(functools.partial(TwoLosses, "adam"), even),
    "two backward passes, sparse": Comparison(functools.partial(TwoLosses, "adagrad", True), even),
    "accumulation by hand": Comparison(functools.partial(AccumulatedByHand, "adam"), even),
    "accumulation by hand, sparse": Comparison(functools.partial(AccumulatedByHand, "adagrad", True), even),
    "clipping by value": Comparison(
        functools.partial(Words, "sgd", reduction="sum"),
        even,
        arguments={"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    ),
    "SparseAdam alone": Comparison(functools.partial(OnlyTable, "sparseadam", True), uneven),
    "rows that are only read": Comparison(functools.partial(OnlyRead, "sparseadam", True), uneven),
    "sparse momentum": Comparison(functools.partial(Words, "momentum", True), even),
    "parameter groups and a schedule": Comparison(functools.partial(Groups, "adamw"), even),
    "many blocks": Comparison(functools.partial(Words, "adam"), even, block_bytes=100),
    "several dtypes": Comparison(functools.partial(MixedDtypes, "sgd"), even, tolerance=1e-6),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_equals_ddp(ranks: Callable[[int], Ranks], case: Comparison) -> None:
    """Parameters, buffers, optimizer state and each rank's losses."""
    compare(ranks, case)
