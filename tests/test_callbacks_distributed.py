"""Lightning's own callbacks do under ``embrace`` what they do under ``ddp``, or say that they cannot."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelSummary,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger

from tests.support.lifecycle import (
    Whole,
    assert_same,
    loader,
    make_model,
    make_strategy,
    make_trainer,
    results,
)


class Tuned(Whole):
    """Has a learning rate that a tuner can find."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        optimizers, _ = super().configure_optimizers()
        optimizers[0].param_groups[0]["lr"] = self.lr
        return optimizers


class Watcher(Callback):
    """Reads gradients and weights of the dense part where callbacks usually do."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.seen.append(float(module.head.weight.grad.norm()))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.append(float(module.head.weight.norm()))


#: name: model, callbacks, Trainer arguments
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "early stopping": (
        Whole,
        lambda: [EarlyStopping("val_loss", patience=1, min_delta=10.0)],
        {"max_epochs": 5},
    ),
    "learning rate monitor": (Whole, lambda: [LearningRateMonitor("step")], {"logger": True, "log_every_n_steps": 1}),
    "learning rate finder": (
        Tuned,
        lambda: [LearningRateFinder(1e-4, 0.5, num_training_steps=16, early_stop_threshold=None)],
        {"max_epochs": 2},
    ),
    "learning rate finder that stops": (
        Tuned,
        lambda: [LearningRateFinder(1e-4, 1e3, num_training_steps=30, early_stop_threshold=1.5)],
        {"max_epochs": 2},
    ),
    "accumulation scheduler": (Whole, lambda: [GradientAccumulationScheduler({0: 1, 1: 2})], {"max_epochs": 2}),
    "timer, summary, watcher": (Whole, lambda: [Timer(), ModelSummary(2), Watcher()], {}),
}


def fit(strategy: str, case: str, folder: str) -> Any:
    cls, make, arguments = CASES[case]
    model, callbacks = make_model(cls=cls), make()
    if arguments.get("logger"):
        arguments = {**arguments, "logger": CSVLogger(folder, name=strategy)}
    trainer = make_trainer(make_strategy(strategy), callbacks=callbacks, default_root_dir=folder, **arguments)
    trainer.fit(model, loader(20 if cls is Tuned else 3), loader(2, 5))
    seen = [callback.seen for callback in callbacks if isinstance(callback, Watcher)]
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return results(model, trainer), trainer.current_epoch, getattr(model, "lr", None), rates, seen


@pytest.mark.parametrize("case", CASES)
def test_equals_ddp(ranks, tmp_path, case):
    expected = ranks(2).run(fit, "ddp", case, str(tmp_path))
    got = ranks(2).run(fit, "embrace", case, str(tmp_path))
    assert_same(got, expected, tolerance=1e-10)
    if case == "learning rate finder":
        assert got[0][2] != 0.01, "the finder found something"
    if case == "learning rate monitor":
        logs = [(tmp_path / s / "version_0" / "metrics.csv").read_text() for s in ("embrace", "ddp")]
        assert logs[0] == logs[1] and "lr-Adam" in logs[0]


def find_batch_size(folder: str) -> None:
    trainer = make_trainer(make_strategy("embrace"), callbacks=[BatchSizeFinder()], default_root_dir=folder)
    trainer.fit(make_model(), loader(3))


def test_batch_size_finder_is_refused(ranks, tmp_path):
    """Lightning refuses it with more than one rank, under ``ddp`` as well."""
    outcomes = ranks(2).try_run(find_batch_size, str(tmp_path))
    assert all(not ok and "Batch size finder is not supported" in text for ok, text in outcomes), outcomes
