"""``wire_dtype``: half the bytes of rows and gradients, and values that are rounded once on each way."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from lightning_embrace import EmbRaceStrategy
from tests.exactness.models import Local
from tests.support.models import VOCABULARY, batches
from tests.support.ranks import Ranks
from tests.support.training import Outcome, outcome, train

N, D, WIDE, RATE, STEPS = 3, 10, 64, 0.1, 10
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: largest relative error of one rounding to nearest
ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}


class Linear(Local):
    """A loss that is linear in the rows, in fp32: the gradient does not depend on them and is known beforehand."""

    def __init__(self, bag: bool) -> None:
        super().__init__("sgd")
        # bags of so many columns travel as vectors
        self.table = nn.EmbeddingBag(VOCABULARY, WIDE, mode="sum") if bag else nn.Embedding(VOCABULARY, D)
        self.seen: list[Tensor] = []

    def double(self) -> Linear:
        return self

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        rows = self.table(batch["ids"])
        self.seen.append(rows.detach().clone())
        factor = factors(batch, rows.shape[-1])
        return (rows * (factor if rows.dim() == 2 else factor.unsqueeze(1))).sum()


class Tiny(Linear):
    """Gradients of about 1e-9, and a rate to match."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) * 1e-9

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e8)


class Curved(Local):
    """A loss of which the rounding errors feed back into the gradients, in fp32."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.table = nn.Embedding(VOCABULARY, D)
        self.head = nn.Linear(D, 3)

    def double(self) -> Curved:
        return self

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.head(torch.tanh(self.table(batch["ids"])).mean(dim=1)).mean(dim=1)
        return (x - batch["target"].float()).pow(2).mean()


class Run(NamedTuple):
    """What one rank saw and has."""

    outcome: Outcome
    seen: list[Tensor]


def factors(batch: dict[str, Tensor], columns: int) -> Tensor:
    """The gradient of each bag, or of each row of a sample, [B, D]."""
    return torch.sin(batch["target"].float().unsqueeze(1) + torch.arange(columns))


def run(make: Callable[[], Any], wire_dtype: str | None, steps: int, shape: dict[str, int]) -> Run:
    """Runs in a worker."""
    data = [step[int(os.environ["LOCAL_RANK"])] for step in batches(steps, N, **shape)]
    model, trainer = train(make, data, EmbRaceStrategy(tables=["*"], wire_dtype=wire_dtype), N)
    return Run(outcome(model, trainer), getattr(model, "seen", []))


def initial(make: Callable[[], Any]) -> Any:
    seed_everything(1, verbose=False)
    return make()


def summed(batch: dict[str, Tensor], gradients: Tensor) -> Tensor:
    """Row gradients of one rank, summed by id, [V, D]."""
    ids = batch["ids"]
    columns = gradients.shape[1]
    each = gradients.unsqueeze(1).expand(*ids.shape, columns).reshape(-1, columns)
    return torch.zeros(VOCABULARY, columns).index_add_(0, ids.flatten(), each)


@pytest.mark.parametrize("wire_dtype", ["bf16", "fp16", None])
def test_rows_and_their_gradients_are_rounded_once(ranks: Callable[[int], Ranks], wire_dtype: str | None) -> None:
    """Every rank sees rows rounded to nearest, its own too; the owner averages rounded sums in the table's dtype."""
    make = functools.partial(Linear, bag=False)
    weight = initial(make).table.weight.detach()
    data = batches(1, N)[0]
    dtype = DTYPES[wire_dtype] if wire_dtype else torch.float32
    mean = torch.stack([summed(batch, factors(batch, D)).to(dtype).float() for batch in data]).mean(dim=0)
    for batch, ours in zip(data, ranks(N).run(run, make, wire_dtype, 1, {})):
        assert torch.equal(ours.seen[0], weight.to(dtype).float()[batch["ids"]])
        after = ours.outcome.state["table.weight"]
        assert after.dtype == torch.float32
        torch.testing.assert_close(after, weight - RATE * mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("wire_dtype", ["bf16", "fp16"])
def test_bags_and_their_gradients_are_rounded_once(ranks: Callable[[int], Ranks], wire_dtype: str) -> None:
    """Pooled vectors are summed in the table's dtype by the owner, and travel rounded."""
    make, shape, dtype = functools.partial(Linear, bag=True), {"size": 2, "length": 40}, DTYPES[wire_dtype]
    weight = initial(make).table.weight.detach()
    data = batches(1, N, **shape)[0]
    mean = torch.stack([summed(batch, factors(batch, WIDE).to(dtype).float()) for batch in data]).mean(dim=0)
    for batch, ours in zip(data, ranks(N).run(run, make, wire_dtype, 1, shape)):
        pooled = weight[batch["ids"]].sum(dim=1)
        torch.testing.assert_close(ours.seen[0], pooled, rtol=ROUNDOFF[wire_dtype], atol=1e-5)
        assert torch.equal(ours.seen[0], ours.seen[0].to(dtype).float())
        torch.testing.assert_close(ours.outcome.state["table.weight"], weight - RATE * mean, rtol=0, atol=1e-5)


@pytest.mark.parametrize("wire_dtype", ["bf16", "fp16"])
def test_half_the_bytes(ranks: Callable[[int], Ranks], wire_dtype: str) -> None:
    """Rows and gradients exactly; ids, headers and dense gradients stay as they are."""
    full = ranks(N).run(run, Curved, None, STEPS, {})
    half = ranks(N).run(run, Curved, wire_dtype, STEPS, {})
    for exact, rounded in zip(full, half):
        assert exact.outcome.sent.keys() == rounded.outcome.sent.keys() >= {"rows", "grads", "ids", "header", "dense"}
        for kind, sent in exact.outcome.sent.items():
            assert rounded.outcome.sent[kind] * (2 if kind in ("rows", "grads") else 1) == sent
        assert exact.outcome.sent["rows"] > 0 and exact.outcome.sent["grads"] > 0


@pytest.mark.parametrize("wire_dtype", ["bf16", "fp16"])
def test_training_stays_within_the_rounding(ranks: Callable[[int], Ranks], wire_dtype: str) -> None:
    """After ten steps of SGD no weight strays by more than two roundoffs of the way that the farthest one has gone."""
    start = initial(Curved).state_dict()
    exact = ranks(N).run(run, Curved, None, STEPS, {})[0].outcome
    rounded = ranks(N).run(run, Curved, wire_dtype, STEPS, {})[0].outcome
    for key, value in exact.state.items():
        way = float((value - start[key]).abs().max())
        strayed = float((rounded.state[key] - value).abs().max())
        assert 0 < strayed < 2 * ROUNDOFF[wire_dtype] * way


def test_fp16_loses_tiny_gradients_and_bf16_does_not(ranks: Callable[[int], Ranks]) -> None:
    """fp16 has more digits and less range: a gradient below 6e-8 vanishes. The documentation recommends bf16."""
    small = functools.partial(Tiny, bag=False)
    start = initial(small).table.weight.detach()
    moved = {
        wire_dtype: not torch.equal(ranks(N).run(run, small, wire_dtype, 1, {})[0].outcome.state["table.weight"], start)
        for wire_dtype in ("bf16", "fp16")
    }
    assert moved == {"bf16": True, "fp16": False}
