"""``CommunicationMonitor`` logs what the strategy has counted, and changes nothing."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.exceptions import MisconfigurationException as OldError

from lightning_embrace import CommunicationMonitor, EmbRaceStrategy
from lightning_embrace import pytorch_lightning as older
from lightning_embrace.monitoring import figures
from lightning_embrace.steps import StepCost
from tests.support.lifecycle import Whole, assert_same, loader, make_model, make_trainer, results
from tests.support.models import batches
from tests.support.program import OldNet
from tests.support.scalars import read_scalars

NAMES = {f"embrace/{name}" for name in ("sent_mb", "exposed_ms", "unique_share", "prior_share", "early_share")}
STEPS = 6


class Payload(Callback):
    """Keeps the strategy's own count at every step's end, and what the progress bar would show."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.shown: set[str] = set()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.sent.append(trainer.strategy.traffic.total_sent())

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.sent.append(trainer.strategy.traffic.total_sent())
        self.shown |= set(trainer.progress_bar_metrics)


def fit(folder: Path, monitored: bool, prog_bar: bool = False, trace: bool = False, **arguments: Any) -> Any:
    """Runs in a worker."""
    payload = Payload()
    callbacks = [payload, *([CommunicationMonitor(prog_bar)] if monitored else [])]
    loggers = [CSVLogger(str(folder), name="csv"), TensorBoardLogger(str(folder), name="tensorboard")]
    strategy = EmbRaceStrategy(tables=["*"], lookahead=told, trace=folder / "trace.json" if trace else None)
    model = make_model(optimizer="sgd")
    arguments = {"callbacks": callbacks, "logger": loggers, "log_every_n_steps": 1, **arguments}
    trainer = make_trainer(strategy, **arguments)
    trainer.fit(model, loader(STEPS), loader(2, 5))
    outcome = results(model, trainer)
    logged = {name: value for name, value in outcome["metrics"].items() if name.startswith("embrace/")}
    outcome["metrics"] = {k: v for k, v in outcome["metrics"].items() if k not in logged}
    return outcome, logged, payload.sent, payload.shown


def told(batch: Any) -> Any:
    """What a batch looks up."""
    return {"words": batch["ids"], "bags": batch["ids"]}


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Lines of the CSV logger's file that the monitor has written."""
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("embrace/sent_mb")]


def test_every_step_is_logged_as_it_was_counted(ranks, tmp_path):
    """In both loggers; each rank has its own in ``callback_metrics``; the training is the one without the callback."""
    (plain, none, _, _), _ = ranks(2).run(fit, tmp_path / "without", False)
    (ours, logged, sent, shown), (_, of_rank_1, sent_1, _) = ranks(2).run(fit, tmp_path / "with", True)
    assert none == {} and shown & NAMES == set()
    assert_same(ours, plain)
    assert set(logged) == set(of_rank_1) == NAMES
    assert logged["embrace/sent_mb"] == pytest.approx((sent[-1] - sent[-2]) / 1e6)
    assert of_rank_1["embrace/sent_mb"] == pytest.approx((sent_1[-1] - sent_1[-2]) / 1e6)
    rows = rows_of(tmp_path / "with")
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    for row, before, after in zip(rows, sent, sent[1:]):
        assert float(row["embrace/sent_mb"]) == pytest.approx((after - before) / 1e6, rel=1e-5)
        assert float(row["embrace/exposed_ms"]) > 0.0
    scalars = read_scalars(tmp_path / "with" / "tensorboard" / "version_0")
    for name in NAMES:
        assert [value for _, value in scalars[name]] == pytest.approx(
            [float(row[name]) for row in rows if row[name]], rel=1e-5
        )


def test_shares_are_those_of_the_batches(ranks, tmp_path):
    """Unique: counted by hand from the ids, of two look-ups of the same ids each step."""
    ranks(2).run(fit, tmp_path, True)
    rows = rows_of(tmp_path)
    for row, step in zip(rows, batches(STEPS, 2)):
        ids = step[0]["ids"]
        assert float(row["embrace/unique_share"]) == pytest.approx(ids.unique().numel() / ids.numel())
    assert any(0.0 < float(row["embrace/prior_share"]) < 1.0 for row in rows[1:-1])
    assert any(float(row["embrace/early_share"]) > 0.0 for row in rows[1:] if row["embrace/early_share"])
    assert float(rows[-1]["embrace/prior_share"]) == 1.0, "no step follows to hide anything behind"


def test_in_the_progress_bar_on_request(ranks, tmp_path):
    """And beside a trace, which is written as without it; while gradients accumulate nothing is logged."""
    arguments = {"accumulate_grad_batches": 2}
    ((_, logged, sent, shown), _) = ranks(2).run(fit, tmp_path, True, True, True, **arguments)
    assert shown >= NAMES and set(logged) == NAMES
    assert (tmp_path / "trace.json").stat().st_size > 1000
    rows = rows_of(tmp_path)
    assert len(rows) == STEPS // 2
    assert sum(float(row["embrace/sent_mb"]) for row in rows) == pytest.approx((sent[-1] - sent[0]) / 1e6, rel=1e-5)


def test_alone(monkeypatch):
    """One rank sends nothing and waits for nobody."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    trainer = make_trainer(EmbRaceStrategy(tables=["*"]), 1, callbacks=[CommunicationMonitor()])
    trainer.fit(make_model(), loader(2, world_size=1))
    assert trainer.callback_metrics["embrace/sent_mb"] == 0.0
    assert 0.0 < trainer.callback_metrics["embrace/unique_share"] <= 1.0
    assert "embrace/prior_share" not in trainer.callback_metrics


@pytest.mark.parametrize("old", [False, True])
def test_another_strategy_is_an_error_that_says_what_to_write(old):
    """In both namespaces, before training."""
    if old:
        trainer: Any = pytorch_lightning.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            callbacks=[older.CommunicationMonitor()],
        )
        model: Any = OldNet()
        error: Any = OldError
    else:
        trainer = make_trainer("auto", 1, callbacks=[CommunicationMonitor()])
        model, error = make_model(cls=Whole), MisconfigurationException
    with pytest.raises(error, match=r"SingleDeviceStrategy trains. Write Trainer\(strategy='embrace'\)"):
        trainer.fit(model, [])


def test_what_is_not_known_is_not_logged():
    """No figure stands for "unknown"."""
    assert figures(StepCost({"rows": 2_000_000, "setup": 5}, {})) == {"embrace/sent_mb": 2.0}
