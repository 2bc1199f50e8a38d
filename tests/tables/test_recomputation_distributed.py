"""Activation checkpointing over look-ups: what backward repeats is answered by what the forward pass got.

The other ranks answer no more then, and what was agreed in the forward pass counts for the gradient's exchange.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.exactness import story as s
from tests.support.ranks import Ranks
from tests.support.training import assert_equal
from tests.tables.scripts import Scripted, check, look

V = 12
_LARGE = [[1, 2, 3, 4, 5, 6], [6, 7, 8, 9, 10, 0]]  # 2 bags, 11 rows: vectors are fewer
_SMALL = [[1, 1, 1], [1, 2, 2], [2, 2, 1]]  # 3 bags, 2 rows: rows are fewer

# ---- blocks of a model -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A look-up of its own, one of the table that all blocks share, and dense layers with dropout."""

    def __init__(self, shared: nn.Embedding, own: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, own
        self.dense = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10))

    def forward(self, x: Tensor, ids: Tensor, more: Tensor) -> Tensor:
        own = self.own(ids)
        own = own.sum(1) if own.dim() == 3 else own
        return torch.tanh(self.dense(x) + own * self.shared(more).sum(1))


class Deep(s.Story):
    """Blocks with look-ups, one after the other.

    Args:
        optimizer: As in :class:`~tests.exactness.story.Story`.
        how: ``"plain"``, or how the blocks are checkpointed: ``"reentrant"``, ``"not reentrant"``, or ``"nested"``, all
            of them inside a checkpoint as well.
        bags: The second block looks up bags.
    """

    def __init__(self, optimizer: str, how: str = "plain", bags: bool = True) -> None:
        super().__init__(optimizer)
        self.how = how
        options: dict[str, Any] = {"sparse": True}
        second = nn.EmbeddingBag(s.ROWS, 10, mode="mean", **options) if bags else nn.Embedding(s.ROWS, 10, **options)
        owns = [nn.Embedding(s.ROWS, 10, padding_idx=0, **options), second]
        self.blocks = nn.ModuleList([Block(self.words, own) for own in owns])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        # ids alone would give reentrant checkpointing nothing to differentiate
        x = self.words(batch["ids"]).sum(1) + self.bags(batch["more"])
        run = functools.partial(self.run, ids=batch["ids"], more=batch["more"])
        x = checkpoint(run, x, use_reentrant=False) if self.how == "nested" else run(x)
        return F.mse_loss(self.body(x).mean(1), batch["target"], reduction="sum")

    def run(self, x: Tensor, ids: Tensor, more: Tensor) -> Tensor:
        for block in self.blocks:
            if self.how == "plain":
                x = block(x, ids, more)
            else:
                x = checkpoint(block, x, ids, more, use_reentrant=self.how == "reentrant")
        return x


def ids(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What it looks up."""
    first, more = batch["ids"], batch["more"]
    return {"words": torch.cat([first, more]), "bags": more, "blocks.0.own": first, "blocks.1.own": first}


def compare(
    ranks: Callable[[int], Ranks], how: str, schedule: str, world_size: int, lookahead: Any, every: int, bags: bool
) -> None:
    """Trains with and without checkpointing: the numbers of one process, and the same bytes of every kind."""
    data = s.drawn(5, world_size)
    make = functools.partial(Deep, "adam", bags=bags)
    plain = s.in_one_process(make, data, accumulate_grad_batches=every)
    settings = {"schedule": schedule, "lookahead": lookahead}
    runs = [
        ranks(world_size).run(s.on_rank, functools.partial(make, how=h), data, settings, accumulate_grad_batches=every)
        for h in ("plain", how)
    ]
    for rank, (without, ours) in enumerate(zip(*runs)):
        assert_equal(ours.outcome, plain.outcome._replace(losses=plain.outcome.losses[rank::world_size]))
        assert ours.outcome.sent == without.outcome.sent
        assert ours.steps == without.steps, "what was planned, early, delayed or foreseen"


HOW = ("reentrant", "not reentrant", "nested")
#: reentrant checkpointing runs the forward pass without gradients, where bags are pooled by other numbers
SAMPLE = [
    ("reentrant", "2d", 2, ids, 1, False),
    ("not reentrant", "2d", 3, ids, 1, True),
    ("not reentrant", "fifo", 2, "off", 2, True),
    ("nested", "2d", 2, "auto", 2, True),
    ("reentrant", "fifo", 3, "off", 1, False),
]


@pytest.mark.parametrize(("how", "schedule", "world_size", "lookahead", "every", "bags"), SAMPLE)
def test_blocks(
    ranks: Callable[[int], Ranks], how: str, schedule: str, world_size: int, lookahead: Any, every: int, bags: bool
) -> None:
    """Look-ups between dense layers, of shared and own tables, foreseen or not."""
    compare(ranks, how, schedule, world_size, lookahead, every, bags)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("how", "schedule", "world_size", "lookahead", "every"),
    list(itertools.product(HOW, ("2d", "horizontal", "vertical", "fifo"), (2, 3), (ids, "auto", "off"), (1, 2))),
)
def test_all_blocks(
    ranks: Callable[[int], Ranks], how: str, schedule: str, world_size: int, lookahead: Any, every: int
) -> None:
    """The full product."""
    compare(ranks, how, schedule, world_size, lookahead, every, bags=how != "reentrant")


# ---- one look-up after the other ---------------------------------------------------------------------------------


class Recomputed(Scripted):
    """Runs its look-ups under activation checkpointing, or not."""

    reentrant = False

    def look_up(self, call: dict[str, Any]) -> Tensor:
        if call.get("plain"):
            return super().look_up(call)
        anchor = torch.ones((), requires_grad=True)
        run = super().look_up
        return checkpoint(lambda a: torch.sin(run(call) * a), anchor, use_reentrant=self.reentrant)


class RecomputedReentrant(Recomputed):
    """As torch did it first: the forward pass runs without gradients."""

    reentrant = True


BOTH = pytest.mark.parametrize("model", [Recomputed, RecomputedReentrant])


@BOTH
def test_activation_checkpointing(ranks: Callable[[int], Ranks], model: type[Recomputed]) -> None:
    """Regression: look-ups repeated in backward asked the other ranks again, which answer no more, and hung.

    Rows and pooled vectors of the forward pass are found again, also where other look-ups came between.
    """
    tables = {
        "bag": functools.partial(nn.EmbeddingBag, V, 8, mode="sum"),
        "words": functools.partial(nn.Embedding, V, 5, padding_idx=1),
    }
    calls = [
        look("bag", _LARGE),
        look("words", [1, 2, 3]),
        look("bag", [[0, 1, 2, 3, 11]], plain=True),
        look("bag", _LARGE),
        look("bag", _SMALL),
        look("words", [[3, 4]], plain=True),
    ]
    data = [[calls, calls[:2]], [calls[1:3], []], [calls, calls]]
    check(ranks, functools.partial(model, "sgd", **tables), data)


@BOTH
def test_the_same_bags_before_and_after_their_rows_came(ranks: Callable[[int], Ranks], model: type[Recomputed]) -> None:
    """Regression: pooled at first, and made of rows when these had been fetched; in backward both were pooled.

    torch found that the repeated forward pass had saved other tensors, and raised.
    """
    rows = look("bag", [[i] for i in range(V)], plain=True)
    calls = [look("bag", _LARGE), rows, look("bag", _LARGE)]
    data = [[calls, calls[:1]], [calls[1:], calls[::-1]]]
    check(ranks, functools.partial(model, "adam", bag=functools.partial(nn.EmbeddingBag, V, 8, mode="sum")), data)


@BOTH
def test_as_many_pooled_look_ups_as_there_may_be(ranks: Callable[[int], Ranks], model: type[Recomputed]) -> None:
    """Regression: at the limit, those repeated in backward wanted their rows."""
    pairs = itertools.islice(itertools.combinations(range(V), 4), 70)
    calls = [look("bag", [list(ids)]) for ids in pairs]
    check(
        ranks,
        functools.partial(model, "sgd", bag=functools.partial(nn.EmbeddingBag, V, 64, mode="sum")),
        [[calls, calls[:3]], [calls[:1], []]],
    )


class Weighted(Recomputed):
    """Weights per sample that the checkpointed part computes, and trains."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor = nn.Parameter(torch.tensor(0.8))

    def look_up(self, call: dict[str, Any]) -> Tensor:
        anchor = torch.ones((), requires_grad=True)
        plain = functools.partial(Scripted.look_up, self)

        def run(a: Tensor) -> Tensor:
            weights = torch.cos(call["weights"] * self.factor)
            return torch.sin(plain({**call, "weights": weights}) * a)

        return checkpoint(run, anchor, use_reentrant=self.reentrant)


class WeightedReentrant(Weighted):
    """In the forward pass, nothing says that the weights are trained."""

    reentrant = True


@pytest.mark.parametrize("model", [Weighted, WeightedReentrant])
def test_weights_that_the_checkpointed_part_trains(ranks: Callable[[int], Ranks], model: type[Weighted]) -> None:
    """Regression: reentrant checkpointing pooled them, and in backward their gradient wanted the rows."""
    weights = torch.arange(12, dtype=torch.float64).view(2, 6) / 12
    calls = [look("bag", _LARGE, weights=weights), look("bag", [[1, 2, 3]], weights=[[0.5, 0.25, 2.0]])]
    data = [[calls, calls[:1]], [calls[1:], calls]]
    # a parameter that two reentrant checkpoints use cannot be averaged while backward runs: ddp refuses it, too
    data = [[rank[:1] for rank in step] for step in data] if model is WeightedReentrant else data
    check(ranks, functools.partial(model, "adam", bag=functools.partial(nn.EmbeddingBag, V, 8, mode="sum")), data)
