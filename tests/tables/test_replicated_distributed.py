"""Tables that stay whole on every rank equal Lightning's ``ddp``, whatever the reason and the form they travel in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_embrace.comm.traffic import ring_bytes
from tests.exactness.models import COLUMNS, Local, PartlyFrozen, Words
from tests.support import all_ranks
from tests.support.ddp import WORLD_SIZE, Comparison, Pair, compare, even, uneven
from tests.support.models import VOCABULARY, TwoTables
from tests.support.ranks import Ranks

ELEMENT = 8


class Tied(Local):
    """The table is the output layer too; in some batches only look-ups reach it."""

    def __init__(self, optimizer: str, sparse: bool) -> None:
        super().__init__(optimizer)
        self.table = nn.Embedding(VOCABULARY, COLUMNS, sparse=sparse)
        self.out = nn.Linear(COLUMNS, VOCABULARY)
        self.out.weight = self.table.weight

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = torch.tanh(self.table(batch["ids"]))
        if batch["ids"][0, 0] % 2:
            return x.pow(2).mean()
        return F.cross_entropy(self.out(x).flatten(0, 1), batch["ids"].roll(1, dims=1).flatten())


class Wide(Local):
    """A table of many rows, of which a batch touches few, and a table of one row."""

    def __init__(self, optimizer: str, sparse: bool) -> None:
        super().__init__(optimizer)
        self.table = nn.Embedding(40 * VOCABULARY, COLUMNS, sparse=sparse)
        self.single = nn.Embedding(1, COLUMNS, sparse=sparse)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        x = torch.tanh(self.table(ids * 31) * self.single(torch.zeros_like(ids)))
        return F.mse_loss(x.mean(dim=(1, 2)), batch["target"])


def none_sharded(pairs: list[Pair]) -> bool:
    return all("rows" not in pair.ours.sent and "grads" not in pair.ours.sent for pair in pairs)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_too_small_to_pay(ranks: Callable[[int], Ranks], sparse: bool) -> None:
    """`tables="auto"` leaves small tables whole."""
    pairs = compare(ranks, Comparison(functools.partial(Words, "adagrad", sparse), uneven, tables="auto"))
    assert none_sharded(pairs)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_one_excluded_beside_a_sharded_one(ranks: Callable[[int], Ranks], sparse: bool) -> None:
    pairs = compare(
        ranks, Comparison(functools.partial(TwoTables, COLUMNS, sparse, "sgd"), even, tables=["*", "!tags"])
    )
    for pair in pairs:
        assert {"rows", "grads", "replicated"} <= pair.ours.sent.keys()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_max_norm(ranks: Callable[[int], Ranks], sparse: bool) -> None:
    """Each rank shortens the rows that it looks up. The replicas differ then, as under ddp, in the same way."""
    make = functools.partial(Words, "sgd", sparse, max_norm=0.5)
    pairs = compare(ranks, Comparison(make, even))
    assert none_sharded(pairs)
    weights = [pair.ours.state["table.weight"] for pair in pairs]
    assert not torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_tied(ranks: Callable[[int], Ranks], sparse: bool) -> None:
    """Its gradient travels with the dense blocks, also where only look-ups reach it. ddp refuses the sparse one."""
    make = functools.partial(Tied, "sgd", sparse)
    if not sparse:
        compare(ranks, Comparison(make, even, ddp="ddp_find_unused_parameters_true"))
    for ours in all_ranks.compare(ranks, make, even, ["*"]):
        assert set(ours.sent) == {"header", "dense", "setup"}
        assert torch.equal(ours.state["table.weight"], ours.state["out.weight"])


def test_frozen(ranks: Callable[[int], Ranks]) -> None:
    """Nothing of it travels, and it does not move, whatever the weight decay."""
    pairs = compare(ranks, Comparison(functools.partial(PartlyFrozen, "adamw"), even, tables=["*"]))
    for pair in pairs:
        assert "replicated" not in pair.ours.sent


def bytes_of_one_step(touched: list[int], rank: int, rows: int, sparse: bool) -> int:
    """What a rank sends for a table by the cheaper form: its rows to all others, or a ring AllReduce of it all."""
    row = COLUMNS * ELEMENT + 4
    dense = ring_bytes(rows * (COLUMNS + sparse) * ELEMENT, len(touched))
    others = len(touched) - 1
    return others * touched[rank] * row if others * sum(touched) * row < len(touched) * dense else dense


def touched_rows(data: Callable[..., list[Any]], of: Callable[[Tensor], Tensor]) -> list[list[int]]:
    """Per step, the number of rows that each rank touches."""
    by_rank = [data(rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
    return [[of(batch["ids"]).unique().numel() for batch in step] for step in zip(*by_rank)]


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_few_rows_travel_as_rows(ranks: Callable[[int], Ranks], sparse: bool) -> None:
    """Of a table with many rows, the touched ones are sent; one that is a single row anyway is AllReduced."""
    pairs = compare(ranks, Comparison(functools.partial(Wide, "sgd", sparse), even, tables="auto"))
    steps = touched_rows(even, lambda ids: ids * 31)
    row = COLUMNS * ELEMENT + 4
    for rank, pair in enumerate(pairs):
        wide = sum((WORLD_SIZE - 1) * touched[rank] * row for touched in steps)
        single = sum(bytes_of_one_step([1] * WORLD_SIZE, rank, 1, sparse) for _ in steps)
        assert single == len(steps) * ring_bytes((COLUMNS + sparse) * ELEMENT, WORLD_SIZE)
        assert pair.ours.sent["replicated"] == wide + single


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_many_rows_travel_dense(ranks: Callable[[int], Ranks], sparse: bool) -> None:
    """Large batches touch most of a small table. Rank and batch decide nothing: the form is agreed in every step."""
    large = functools.partial(even, size=12, length=8)
    pairs = compare(ranks, Comparison(functools.partial(Words, "adagrad", sparse), large, tables="auto"))
    steps = touched_rows(large, lambda ids: torch.stack([ids, (ids + 1) % VOCABULARY]))
    dense = ring_bytes(VOCABULARY * (COLUMNS + sparse) * ELEMENT, WORLD_SIZE)
    for rank, pair in enumerate(pairs):
        assert pair.ours.sent["replicated"] == len(steps) * dense
        assert all(bytes_of_one_step(touched, rank, VOCABULARY, sparse) == dense for touched in steps)
