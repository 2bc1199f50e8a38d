"""Runs that are saved and go on: a model that draws random numbers, and loaders of every kind, for any ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_embrace import EmbRaceStrategy
from tests.exactness.story import slow_wire
from tests.support.lifecycle import At, make_trainer, plain, this_rank
from tests.support.models import VOCABULARY

#: samples in an epoch, and of them in a step, on all ranks together: four steps to an epoch
SAMPLES, GLOBAL_BATCH, STEPS = 48, 12, 4
EPOCHS = 3


class Drawing(LightningModule):
    """A table, a bag and a head, trained by Adagrad with a schedule.

    Args:
        draws: Dropout, and noise from Python's and NumPy's generators.
        estimates: Asks how many steps there will be, for which Lightning sets the training loaders up early.
    """

    def __init__(self, draws: bool = True, estimates: bool = False) -> None:
        super().__init__()
        self.draws, self.estimates = draws, estimates
        self.words = nn.Embedding(VOCABULARY, 5)
        self.bags = nn.EmbeddingBag(VOCABULARY, 3, mode="sum")
        self.head = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.losses: list[float] = []
        self.own: list[float] = []
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = torch.cat([torch.tanh(self.words(batch["ids"])).mean(1), self.bags(batch["ids"])], dim=1)
        if self.draws:
            x = nn.functional.dropout(x, 0.3) * (1 + 0.1 * random.random() + 0.1 * np.random.rand())
        loss = (self.head(x).squeeze(1) - batch["target"]).pow(2).mean()
        self.seen += 1
        self.own.append(float(loss.detach()))
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.words(batch["ids"])

    def configure_optimizers(self) -> Any:
        if self.estimates:
            assert self.trainer.estimated_stepping_batches == EPOCHS * STEPS
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7), "interval": "step"}]


# ---- data ------------------------------------------------------------------------------------------------------------


def sample(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, VOCABULARY, (4,), generator=generator)
    return {"ids": ids, "target": torch.randn((), generator=generator, dtype=torch.float64)}


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return sample(index)


class Stream(IterableDataset[dict[str, Tensor]]):
    """This rank's samples; no length."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (sample(index) for index in range(self.rank, SAMPLES, self.world_size))


class StatefulStream(Stream):
    """The same, saving its own position; each rank's has something of its own in its state."""

    position = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        indices = list(range(self.rank, SAMPLES, self.world_size))
        while self.position < len(indices):
            self.position += 1
            yield sample(indices[self.position - 1])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["rank"] == self.rank, "another rank's state"
        self.position = state["position"]


def loader(kind: str, rank: int, world_size: int) -> Any:
    """``sized`` and ``iterable`` are torch's; ``stateful`` and ``stream`` torchdata's, with and without a length."""
    size = GLOBAL_BATCH // world_size
    if kind == "iterable":
        return DataLoader(Stream(rank, world_size), batch_size=size)
    sampler: Any = DistributedSampler(Samples(), world_size, rank, shuffle=True, seed=3)  # type: ignore[arg-type]
    if kind == "sized":
        return DataLoader(Samples(), batch_size=size, sampler=sampler)
    from torchdata.stateful_dataloader import StatefulDataLoader

    if kind == "stateful":
        return StatefulDataLoader(Samples(), batch_size=size, sampler=sampler)
    return StatefulDataLoader(StatefulStream(rank, world_size), batch_size=size)


# ---- runs ------------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """How a run trains and saves."""

    kind: str
    state_dict_type: str = "full"
    schedule: str = "2d"
    communication: str = "torch"
    draws: bool = True
    estimates: bool = False
    validates: bool = False

    def strategy(self) -> Any:
        options = {} if self.state_dict_type == "full" else {"state_dict_type": self.state_dict_type}
        return EmbRaceStrategy(
            tables=["*"],
            schedule=self.schedule,
            communication=self.communication,
            **options,  # type: ignore[arg-type]
        )


class Result(NamedTuple):
    """What a run leaves behind on a rank."""

    losses: list[float]
    own: list[float]
    state: dict[str, Tensor]
    optimizer: Any
    rates: list[float]


def run(
    way: Way | str,
    world_size: int,
    path: str | None = None,
    kind: str | None = None,
    draws: bool | None = None,
    callbacks: tuple[Callback, ...] = (),
    **arguments: Any,
) -> Result:
    """Runs in a worker: all epochs, or what is left of them from a checkpoint on, with generators that differ then.

    Args:
        way: How to train; a string is another strategy, with ``kind`` and ``draws``.
        world_size: N.
        path: The checkpoint.
        kind: Of loader.
        draws: Whether the model draws.
        callbacks: For the Trainer.
        **arguments: For the Trainer.
    """
    ours = isinstance(way, Way)
    seed_everything((1 if path is None else 50) + this_rank(), verbose=False)
    model = Drawing(way.draws, way.estimates) if isinstance(way, Way) else Drawing(bool(draws))
    strategy = way.strategy() if isinstance(way, Way) else way
    with slow_wire() if ours else nullcontext():
        trainer = make_trainer(
            strategy, world_size, max_epochs=EPOCHS, callbacks=list(callbacks), enable_checkpointing=bool(callbacks),
            **arguments,
        )  # fmt: skip
        trainer.fit(
            model,
            loader(way.kind if isinstance(way, Way) else str(kind), this_rank(), world_size),
            loader("iterable", this_rank(), world_size) if isinstance(way, Way) and way.validates else None,
            ckpt_path=path,
            weights_only=None if path is None else True,
        )
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    states = plain(trainer.optimizers[0].state_dict()["state"])
    return Result(model.losses, model.own, plain(dict(model.state_dict())), states, rates)


def saved(way: Way | str, world_size: int, folder: str, **arguments: Any) -> Result:
    """All epochs, with checkpoints after every second step, and after every epoch or in its validation."""
    by_step = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    in_validation = isinstance(way, Way) and way.validates
    by_epoch = ModelCheckpoint(folder, "after-{epoch}", save_top_k=-1, save_on_train_epoch_end=not in_validation)
    return run(way, world_size, callbacks=(by_step, by_epoch), **arguments)


def saved_after(way: Way, world_size: int, path: str, batches: int, **arguments: Any) -> Result:
    """All epochs, with a checkpoint after some batches."""
    at = At("on_train_batch_end", lambda trainer, _: trainer.save_checkpoint(path), count=batches)
    return run(way, world_size, callbacks=(at,), **arguments)


def assert_goes_on(ours: Result, whole: Result, tolerance: float = 1e-10) -> None:
    """A run that went on has the last losses of the whole one, and ends where that ended."""
    assert 0 < len(ours.losses) <= len(whole.losses)
    close = {"rtol": 0, "atol": tolerance}
    for mine, theirs in ((ours.losses, whole.losses), (ours.rates, whole.rates)):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs)[-len(mine) :], **close)
    torch.testing.assert_close(ours.state, whole.state, **close)
    torch.testing.assert_close(ours.optimizer, whole.optimizer, **close)
