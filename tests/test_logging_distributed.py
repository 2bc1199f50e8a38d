"""Logged values and torchmetrics are reduced over the ranks as under ``ddp``, and loggers write the same."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAccuracy

from tests.support.lifecycle import (
    Whole,
    assert_same,
    loader,
    make_model,
    make_strategy,
    make_trainer,
    results,
    this_rank,
)
from tests.support.scalars import read_scalars


class Measured(Whole):
    """Logs in every way that Lightning knows: reduced or not, by step and by epoch, metrics and values."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.accuracy = BinaryAccuracy()
        self.each = MeanMetric(dist_sync_on_step=True)
        self.mean = MeanMetric()
        self.errors = MetricCollection({"mse": MeanSquaredError(), "mae": MeanAbsoluteError()})

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        mine = float(this_rank() + 1)
        self.log("before", mine, sync_dist=True)  # ahead of the look-ups
        loss = super().training_step(batch, batch_idx)
        self.log("own", loss)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        self.log_dict({"sum": mine, "least": -mine}, reduce_fx="sum", on_epoch=True, sync_dist=True)
        guesses = self(batch["ids"]).detach()
        self.accuracy(torch.sigmoid(guesses), (batch["target"] > 0).int())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.mean.update(loss.detach())
        self.log("each", self.each(loss.detach()))  # gathers at once
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.mean.reset()
        self.log("once", float(this_rank()), sync_dist=True, rank_zero_only=False)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.errors.update(self(batch["ids"]), batch["target"])
        self.log_dict(self.errors, on_epoch=True)
        self.log("weighted", float(this_rank()), batch_size=3 + this_rank(), sync_dist=True)


def fit(strategy: str, folder: Path, more: dict[str, Any]) -> Any:
    """Runs in a worker."""
    loggers = [CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="tensorboard")]
    model = make_model(cls=Measured)
    arguments = {"max_epochs": 2, "logger": loggers, "log_every_n_steps": 2, "default_root_dir": folder, **more}
    trainer = make_trainer(make_strategy(strategy), **arguments)
    trainer.fit(model, loader(5), loader(3, 5))
    return results(model, trainer), {k: float(v) for k, v in trainer.progress_bar_metrics.items()}


def lines(folder: Path) -> list[dict[str, Any]]:
    """What the CSV logger wrote, numbers as numbers."""
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        return [{name: float(text) if text else "" for name, text in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize("more", [{}, {"accumulate_grad_batches": 2}], ids=["", "accumulated"])
def test_equals_ddp(ranks, tmp_path, more):
    """The same names, steps and values in both files; metrics keep fp32 sums."""
    expected = ranks(2).run(fit, "ddp", tmp_path / "ddp", more)
    got = ranks(2).run(fit, "embrace", tmp_path / "embrace", more)
    assert_same(got, expected, tolerance=1e-6)
    ours, theirs = (lines(tmp_path / strategy) for strategy in ("embrace", "ddp"))
    assert_same(ours, theirs, tolerance=1e-6)
    written = set(theirs[0])
    assert written >= {
        "own",
        "both_step",
        "both_epoch",
        "largest",
        "sum_epoch",
        "accuracy_epoch",
        "mean",
        "mse",
        "each",
    }
    ours, theirs = (read_scalars(tmp_path / strategy / "tensorboard" / "version_0") for strategy in ("embrace", "ddp"))
    assert_same(ours, theirs, tolerance=1e-6)
    assert {*written} - {"step"} <= {*theirs}
    metrics = got[0][0]["metrics"]
    assert metrics["before"] == 1.5 and metrics["once"] == 0.5, "reduced over both ranks"
