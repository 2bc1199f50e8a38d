"""Arguments of the Trainer that have no other test mean under ``embrace`` what they mean under ``ddp``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler

from tests.support.lifecycle import assert_same, loader, make_model, make_strategy, make_trainer, plain, results

_STOPPING = {"max_epochs": 4, "callbacks": lambda: [EarlyStopping("val_loss", patience=1, min_delta=10.0)]}

#: by argument, what the Trainer is given; functions are called on each rank
CASES: dict[str, dict[str, Any]] = {
    "fast_dev_run": {"fast_dev_run": 2},
    "max_epochs": {"max_epochs": 3},
    "min_epochs": {**_STOPPING, "min_epochs": 3},
    "max_steps": {"max_steps": 6, "max_epochs": -1},
    "min_steps": {**_STOPPING, "min_steps": 13},
    "max_time": {"max_time": timedelta(0), "max_epochs": 2},
    "limit_train_batches": {"limit_train_batches": 0.5, "max_epochs": 2},
    "limit_val_batches": {"limit_val_batches": 1},
    "limit_test_batches": {"limit_test_batches": 1},
    "limit_predict_batches": {"limit_predict_batches": 1},
    "overfit_batches": {"overfit_batches": 2, "max_epochs": 2},
    "val_check_interval": {"val_check_interval": 2},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "num_sanity_val_steps": {"num_sanity_val_steps": 1},
    "enable_checkpointing": {"enable_checkpointing": True},
    "enable_progress_bar": {"enable_progress_bar": True},
    "enable_model_summary": {"enable_model_summary": True},
    "deterministic": {"deterministic": True},
    "benchmark": {"benchmark": True},
    "inference_mode": {"inference_mode": False},
    "profiler": {"profiler": lambda folder: SimpleProfiler(folder, "profile")},
    "profiler (advanced)": {"profiler": lambda folder: AdvancedProfiler(folder, "profile")},
    "profiler (torch)": {"profiler": lambda folder: PyTorchProfiler(folder, "profile", export_to_chrome=False)},
    "detect_anomaly": {"detect_anomaly": True},
    "barebones": {"barebones": True, "num_sanity_val_steps": None},
    "plugins": {"plugins": lambda: [AsyncCheckpointIO()], "enable_checkpointing": True},
    "default_root_dir": {"enable_checkpointing": True},
    "enable_autolog_hparams": {"enable_autolog_hparams": False, "logger": lambda folder: CSVLogger(folder, name="csv")},
    "model_registry": {"model_registry": "somebody/model"},
}
#: those that concern more than fits
EVERY_STAGE = ("fast_dev_run", "limit_test_batches", "limit_predict_batches", "inference_mode", "profiler")


@contextmanager
def restored() -> Iterator[None]:
    """Some arguments change the process."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def made(name: str, value: Any, folder: Path) -> Any:
    if name in ("profiler", "logger") and callable(value):
        return value(folder)
    return value() if callable(value) else value


def life(strategy: str, case: str, folder: Path) -> Any:
    """Runs in a worker."""
    arguments = {"default_root_dir": folder, **CASES[case]}
    arguments = {name: made(name, value, folder) for name, value in arguments.items()}
    with restored():
        model = make_model()
        trainer = make_trainer(make_strategy(strategy), **arguments)
        trainer.fit(model, loader(4), loader(2, 5))
        ends = results(model, trainer), trainer.global_step, trainer.current_epoch
        if case not in EVERY_STAGE:
            return ends
        tested = trainer.test(model, loader(3, 6), verbose=False)
        return ends, tested, plain(trainer.predict(model, loader(3, 7)))


@pytest.mark.parametrize("case", CASES)
def test_equals_ddp(ranks, tmp_path, case):
    """Weights, states, losses, metrics, predictions, how long it trains, and which files it leaves."""
    expected = ranks(2).run(life, "ddp", case, tmp_path / "ddp")
    assert_same(ranks(2).run(life, "embrace", case, tmp_path / "embrace"), expected, tolerance=1e-10)
    ours, theirs = (
        sorted(str(path.relative_to(tmp_path / s)) for path in (tmp_path / s).rglob("*")) for s in ("embrace", "ddp")
    )
    assert ours == theirs
    if CASES[case].get("enable_checkpointing"):
        assert any(name.endswith(".ckpt") for name in ours)
    if "profiler" in CASES[case]:
        text = "".join(path.read_text() for path in (tmp_path / "embrace").rglob("*profile*.txt"))
        assert "training_step" in text, text[:300]
