"""Every way of feeding and ending a fit that Lightning has gives DDP's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from tests.support.lifecycle import (
    At,
    Whole,
    assert_same,
    loader,
    make_model,
    make_strategy,
    make_trainer,
    results,
    this_rank,
)
from tests.support.models import batches


class Samples(list[Any]):
    """A dataset of single samples, the same on every rank: the injected sampler shares them out."""

    def __init__(self, count: int, seed: int = 0) -> None:
        step = batches(1, 1, size=count, seed=seed)[0][0]
        super().__init__({"ids": i, "target": t} for i, t in zip(step["ids"], step["target"]))


class Data(LightningDataModule):
    """Loaders whose samples Lightning distributes."""

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(22), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return [DataLoader(Samples(7, 1), batch_size=2), DataLoader(Samples(3, 2), batch_size=2)]


class Reloaded(Data):
    """Other batches in every epoch."""

    def train_dataloader(self) -> Any:
        return loader(2, seed=self.trainer.current_epoch)


class Stream(IterableDataset[Any]):
    """Batches without a length; rank 1 may have fewer an epoch."""

    def __init__(self, counts: tuple[int, int]) -> None:
        self.count = counts[this_rank()]

    def __iter__(self) -> Iterator[Any]:
        return (step[this_rank()] for step in batches(self.count, 2))


class Pairs(Whole):
    """Trains on a dictionary of batches."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = self.loss(batch["a"])
        return loss if batch["b"] is None else loss + self.loss(batch["b"])


class Iterating(Whole):
    """Fetches its batches itself, and learns there that none is left."""

    def training_step(self, dataloader_iter: Any) -> Any:
        batch, *_ = next(dataloader_iter)
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss


class Several(Whole):
    """Validates on two loaders, without logging."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated.append(float(self.loss(batch).detach()) + dataloader_idx)


def stop(trainer: Any, _: Any) -> None:
    trainer.should_stop = True


def combined(mode: str) -> Any:
    return CombinedLoader({"a": loader(3), "b": loader(2, seed=1)}, mode)


#: name: model, Trainer arguments, what feeds the fit
CASES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "datamodule": (Several, {"use_distributed_sampler": True, "max_epochs": 2}, Data),
    "reload": (Whole, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3, "limit_val_batches": 0}, Reloaded),
    "stream": (Whole, {"max_epochs": 2, "val_check_interval": 2}, lambda: DataLoader(Stream((3, 3)), batch_size=None)),
    "combined min": (Pairs, {}, lambda: combined("min_size")),
    "combined cycle": (Pairs, {}, lambda: combined("max_size_cycle")),
    "combined max": (Pairs, {}, lambda: combined("max_size")),
    "limit": (Whole, {"limit_train_batches": 2, "limit_val_batches": 1, "max_epochs": 2}, lambda: loader(4)),
    "max_steps": (Whole, {"max_steps": 5, "max_epochs": -1}, lambda: loader(3)),
    "fast_dev_run": (Whole, {"fast_dev_run": True}, lambda: loader(3)),
    "accumulate": (Whole, {"accumulate_grad_batches": 2, "max_epochs": 2}, lambda: loader(3)),
    "should_stop": (Whole, {"callbacks": lambda: [At("on_train_batch_end", stop, count=2)]}, lambda: loader(4)),
    "dataloader_iter": (Iterating, {"max_epochs": 2}, lambda: loader(3)),
    "overfit": (Whole, {"overfit_batches": 1, "max_epochs": 2}, lambda: loader(3)),
}


def fit(strategy: str, case: str) -> Any:
    cls, arguments, feed = CASES[case]
    if callable(arguments.get("callbacks")):
        arguments = {**arguments, "callbacks": arguments["callbacks"]()}
    model = make_model(cls=cls)
    trainer = make_trainer(make_strategy(strategy), **arguments)
    fed = feed()
    if isinstance(fed, LightningDataModule):
        trainer.fit(model, datamodule=fed)
    else:
        trainer.fit(model, fed, loader(2, seed=5))
    return results(model, trainer), trainer.global_step, trainer.current_epoch


@pytest.mark.parametrize("case", CASES)
def test_equals_ddp(ranks, case):
    expected = ranks(2).run(fit, "ddp", case)
    assert_same(ranks(2).run(fit, "embrace", case), expected)
