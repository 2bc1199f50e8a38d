"""Random scripts of look-ups: whatever the ranks look up, the numbers are those of N-rank ddp."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import nn

from tests.tables.scripts import Script, Scripted, check, look

ROWS = 11


def _ids(rng: random.Random, count: int) -> torch.Tensor:
    ids = [min(int(rng.expovariate(0.4)), ROWS - 1) for _ in range(count)]
    return torch.tensor(ids, dtype=rng.choice([torch.int32, torch.int64]))


def _call(rng: random.Random, tables: list[str], sparse: bool) -> dict:
    name = rng.choice(tables)
    more = {}
    if rng.random() < 0.15:
        more["grad"] = False
    if rng.random() < 0.2:
        more["used"] = False
    if not name.startswith("bag"):
        # torch's sparse gradient fails on an id without dimensions
        shape = rng.choice([(0,), (3,), (2, 2), (1, 2, 3), (1,) if sparse else ()])
        return look(name, _ids(rng, torch.Size(shape).numel()).view(shape), **more)
    sizes = [rng.randrange(5) for _ in range(rng.randrange(5))]
    ids = _ids(rng, sum(sizes))
    if name == "bag_sum" and rng.random() < 0.5:
        more["weights"] = [rng.uniform(-1, 1) for _ in range(len(ids))]
    starts = [sum(sizes[:k]) for k in range(len(sizes) + (name == "bag_last"))]
    return look(name, ids, starts, **more)


def _script(rng: random.Random, tables: list[str], sparse: bool) -> Script:
    # in a seventh of the cases a rank looks up nothing at all
    return [_call(rng, tables, sparse) for _ in range(rng.choice([0, 1, 2, 2, 3, 4, 6]))]


def _tables(columns: int, sparse: bool) -> dict:
    bag = functools.partial(nn.EmbeddingBag, ROWS, sparse=sparse)
    tables = {
        "plain": functools.partial(nn.Embedding, ROWS, columns, sparse=sparse),
        "padded": functools.partial(nn.Embedding, ROWS, columns + 1, sparse=sparse, padding_idx=1),
        "bag_sum": functools.partial(bag, columns, mode="sum", padding_idx=0),
        "bag_last": functools.partial(bag, columns + 2, mode="mean", include_last_offset=True),
    }
    if not sparse:
        tables["freq"] = functools.partial(nn.Embedding, ROWS, 3, scale_grad_by_freq=True)
        tables["bag_max"] = functools.partial(bag, columns, mode="max", padding_idx=2)
    return tables


@pytest.mark.parametrize(
    ("seed", "world_size", "columns", "sparse", "optimizer"),
    [
        (0, 2, 6, False, "adam"),
        (1, 3, 2, False, "adamw"),
        (2, 3, 8, True, "adagrad"),
        (3, 2, 5, True, "sparseadam"),
        (4, 3, 1, True, "sgd"),
        (5, 1, 4, False, "adam"),
        (6, 3, 16, False, "momentum"),
        (7, 3, 7, True, "sparseadam"),
    ],
)
def test_random_scripts(ranks, seed, world_size, columns, sparse, optimizer):
    """Ranks look up different tables, different numbers of times, under no_grad, in vain, or nothing."""
    rng = random.Random(seed)
    tables = _tables(columns, sparse)
    data = [[_script(rng, list(tables), sparse) for _ in range(world_size)] for _ in range(12)]
    check(ranks, functools.partial(Scripted, optimizer, **tables), data)


@pytest.mark.parametrize(("seed", "sparse", "optimizer"), [(10, False, "adam"), (11, True, "adagrad")])
def test_random_scripts_under_accumulation(ranks, seed, sparse, optimizer):
    """Rows stay for the whole accumulation window, gradients of several backward passes travel once."""
    rng = random.Random(seed)
    tables = _tables(5, sparse)
    data = [[_script(rng, list(tables), sparse) for _ in range(3)] for _ in range(11)]
    check(ranks, functools.partial(Scripted, optimizer, **tables), data, accumulate_grad_batches=3)


class ByHand(Scripted):
    """Manual optimization: several backward passes for one step, a step between look-ups, two optimizers."""

    def __init__(self, optimizer: str, **tables) -> None:
        super().__init__(optimizer, **tables)
        self.automatic_optimization = False

    def training_step(self, batches, batch_idx) -> None:
        first, second = self.optimizers()

        def mean(part):
            return torch.stack([self.loss(batch[part]) for batch in batches]).mean()

        first.zero_grad()
        second.zero_grad()
        early, loss = mean(0), mean(1)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(early + 0.5 * loss)
        first.step()
        again = mean(2)
        self.manual_backward(again)
        second.step()
        if batch_idx % 2:
            second.zero_grad()
            self.manual_backward(mean(3))
            first.step()
            second.step()
        self.losses.append(float(self.trainer.strategy.reduce(again.detach().clone(), reduce_op="mean")))

    def configure_optimizers(self):
        parameters = list(self.parameters())
        return [torch.optim.SGD(parameters[::2], lr=0.05), torch.optim.Adagrad(parameters[1::2], lr=0.05)]


@pytest.mark.parametrize(("seed", "world_size", "sparse"), [(20, 2, False), (21, 3, True)])
def test_random_scripts_by_hand(ranks, seed, world_size, sparse):
    """Whatever is backward's and the optimizers' order, as long as every rank has the same."""
    rng = random.Random(seed)
    tables = _tables(4, sparse)
    data = [[[_script(rng, list(tables), sparse) for _ in range(4)] for _ in range(world_size)] for _ in range(6)]
    check(ranks, functools.partial(ByHand, "sgd", **tables), data)
