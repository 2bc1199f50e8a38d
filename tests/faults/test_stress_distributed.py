"""Every part of every rank is late at random, under every schedule: it must neither hang nor change a number."""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_embrace import EmbRaceStrategy, optim
from lightning_embrace.comm.torch_backend import TorchCommunicator, TorchHandle
from lightning_embrace.schedule import dense
from tests.support.models import Small
from tests.support.training import Outcome, assert_equal, outcome, train

N, ROWS, MOST = 4, 29, 0.003
#: seconds a step, reached only by a run that hangs
WATCHDOG = 5.0
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "rows of adam": lambda p: optim.Adam(p, lr=0.01),
}
Part = dict[str, Any]


class Delays:
    """Sleeps up to 3 ms, now and then; in the process that plays all ranks, never."""

    def __init__(self, salt: str) -> None:
        rank = os.environ.get("LOCAL_RANK")
        self.rng = None if rank is None else random.Random(f"{salt} {rank}")

    def __call__(self, *_: Any) -> None:
        if self.rng is not None and self.rng.random() < 0.3:
            time.sleep(self.rng.random() * MOST)


class Worker(Small):
    """Two tables and two layers; looks up what no look-ahead can know where a batch says so."""

    def __init__(self, optimizer: str, sparse: bool) -> None:
        super().__init__(optimizer)
        self.words = nn.Embedding(ROWS, 8, sparse=sparse, padding_idx=0)
        self.tags = nn.Embedding(ROWS, 3, sparse=sparse)
        self.layers = nn.ModuleList([nn.Linear(11, 11), nn.Linear(11, 1)])
        self.dawdle = Delays("compute")

    def loss(self, part: Part) -> Tensor:
        words, tags = part["words"], part["tags"]
        x = torch.cat([self.words(words), self.tags(tags)], dim=-1)
        self.dawdle()
        if part["surprise"]:
            x = x + torch.cat([self.words((words * 7 + 3) % ROWS), self.tags((tags * 5 + 1) % ROWS)], dim=-1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.dawdle()
            if x.requires_grad:
                x.register_hook(self.dawdle)
        return (x.squeeze(-1).mean(dim=-1) - part["target"]).pow(2).mean()

    def training_step(self, parts: list[Part], batch_idx: int) -> Tensor:
        loss = torch.stack([self.loss(part) for part in parts]).mean()
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, parts: list[Part], batch_idx: int) -> None:
        self.losses.append(float(torch.stack([self.loss(part) for part in parts]).mean()))

    def val_dataloader(self) -> Any:
        return DataLoader(Slow(batches(2, random.Random("validation"))), batch_size=None)

    def on_train_batch_end(self, *_: Any) -> None:
        """Now and then one rank alone reads a row, or a layer's weight."""
        self.dawdle()
        if self.dawdle.rng is not None and (choice := self.dawdle.rng.random()) < 0.2:
            with torch.no_grad():
                self.layers[0].weight.sum() if choice < 0.1 else self.tags(torch.tensor([0, ROWS - 1]))

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + (step % 5) / 5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}


class Slow(list[Any]):
    """Batches that take their time; of each, what this rank trains on."""

    def __init__(self, batches: list[list[Part]]) -> None:
        rank = os.environ.get("LOCAL_RANK")
        super().__init__(batch if rank is None else [batch[int(rank)]] for batch in batches)
        self.dawdle = Delays("loader")

    def __getitem__(self, index: Any) -> Any:
        self.dawdle()
        return super().__getitem__(index)


class AtRandom(Callback):
    """Validates after batches that all ranks draw alike."""

    def __init__(self) -> None:
        self.rng = random.Random("when")

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        trainer.val_check_batch = 1 if self.rng.random() < 0.05 else float("inf")


def batches(count: int, rng: random.Random) -> list[list[Part]]:
    """By step and rank: many ids that come again, some surprises, and what a look-ahead gets wrong."""

    def ids() -> Tensor:
        return torch.tensor([[min(int(rng.expovariate(0.2)), ROWS - 1) for _ in range(3)] for _ in range(2)])

    def part() -> Part:
        target = torch.tensor([rng.random(), rng.random()], dtype=torch.float64)
        mistake = rng.choice(["half", "other", "none"]) if rng.random() < 0.15 else ""
        return {
            "words": ids(),
            "tags": ids(),
            "target": target,
            "surprise": rng.random() < 0.1,
            "mistake": mistake,
        }

    return [[part() for _ in range(N)] for _ in range(count)]


def told(parts: list[Part]) -> dict[str, Tensor]:
    """A look-ahead that is wrong on some ranks in some steps."""
    (part,) = parts
    ids = {"words": part["words"], "tags": part["tags"]}
    if part["mistake"] == "half":
        return {name: i[:1] for name, i in ids.items()}
    if part["mistake"] == "other":
        return {name: (i + 1) % ROWS for name, i in ids.items()}
    return {} if part["mistake"] == "none" else ids


@contextmanager
def slow_engine() -> Iterator[None]:
    """Late before an exchange is issued and before it is waited for, in any thread; a dense block per parameter."""
    patch, dawdle, plan = pytest.MonkeyPatch(), Delays("engine"), dense.plan_blocks

    def late(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def slowly(*args: Any, **kwargs: Any) -> Any:
            dawdle()
            return method(*args, **kwargs)

        return slowly

    for name in ("gather", "all_to_all", "all_reduce"):
        patch.setattr(TorchCommunicator, name, late(getattr(TorchCommunicator, name)))
    patch.setattr(TorchHandle, "wait", late(TorchHandle.wait))
    patch.setattr(dense, "plan_blocks", lambda members: plan(members, block_bytes=1))
    try:
        yield
    finally:
        patch.undo()


def on_rank(
    schedule: Any, lookahead: Any, make: Callable[[], Any], steps: int, seed: int
) -> tuple[Outcome, dict[str, int]]:
    strategy = EmbRaceStrategy(tables=["*"], schedule=schedule, lookahead=lookahead, chunk_bytes=64)
    with slow_engine():
        model, trainer = train(
            make, Slow(batches(steps, random.Random(seed))), strategy, N, callbacks=[Counting(), AtRandom()]
        )
    counting = next(c for c in trainer.callbacks if isinstance(c, Counting))
    return outcome(model, trainer), counting.counts


class Counting(Callback):
    """What the schedule came to: it must have been at work."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        for name, count in trainer.strategy._session.foresight.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count


def check(
    ranks: Any, schedule: str, optimizer: str, sparse: bool, steps: int, lookahead: Any = told
) -> list[dict[str, int]]:
    """Trains on four late ranks and in one process, and compares everything."""
    seed = steps + len(schedule)
    make = functools.partial(Worker, optimizer, sparse)
    data = Slow(batches(steps, random.Random(seed)))
    plain = outcome(*train(make, data, "auto", callbacks=[AtRandom()]))
    assert len(plain.losses) > steps, "there was no validation"
    ran = ranks(N).run(on_rank, schedule, lookahead, make, steps, seed, timeout=60.0 + WATCHDOG * steps)
    ours = [one for one, _ in ran]
    losses = torch.tensor([one.losses for one in ours], dtype=torch.float64).mean(dim=0).tolist()
    for one in ours:
        assert_equal(one._replace(losses=losses), plain)
    return [counts for _, counts in ran]


@pytest.mark.parametrize(
    ("optimizer", "sparse", "lookahead"), [("adagrad", False, told), ("rows of adam", True, "auto")]
)
def test_random_delays(ranks: Any, optimizer: str, sparse: bool, lookahead: Any) -> None:
    """A few steps of what follows, with rows early and late."""
    for counts in check(ranks, "2d", optimizer, sparse, 40, lookahead):
        assert all(counts[name] > 0 for name in ("prior", "delayed", "early", "rest")), counts


@pytest.mark.matrix
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("optimizer", "sparse"), [("adagrad", False), ("momentum", False), ("rows of adam", True)])
@pytest.mark.parametrize("schedule", ["2d", "horizontal", "vertical", "fifo"])
def test_random_delays_for_long(ranks: Any, schedule: str, optimizer: str, sparse: bool) -> None:
    """500 steps, wrong look-aheads among them, validation at random: the numbers of one process."""
    check(ranks, schedule, optimizer, sparse, 500)
