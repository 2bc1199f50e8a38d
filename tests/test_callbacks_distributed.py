"""Lightning's own callbacks do under ``embrace`` what they do under ``ddp``, or say that they cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    ProgressBar,
    RichProgressBar,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.lifecycle import (
    Whole,
    assert_same,
    loader,
    make_model,
    make_strategy,
    make_trainer,
    plain,
    results,
    this_rank,
)
from tests.support.models import batches, concatenated


class Tuned(Whole):
    """Has a learning rate that a tuner can find."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        optimizers, _ = super().configure_optimizers()
        optimizers[0].param_groups[0]["lr"] = self.lr
        return optimizers


class WithBackbone(Whole):
    """Its tables are what another model was trained with."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.backbone = nn.ModuleDict({"words": self.words, "bags": self.bags})


class Watcher(Callback):
    """Reads gradients and weights of the dense part where callbacks usually do."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.seen.append(float(module.head.weight.grad.norm()))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.append(float(module.head.weight.norm()))


class Thaw(BaseFinetuning):
    """Trains the words from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.words)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.words, optimizer, lr=0.02)


class Freeze(BaseFinetuning):
    """Leaves the words, sharded by then, alone in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        pass

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.make_trainable(pl_module.words)
        if epoch == 1:
            self.freeze(pl_module.words)


class Counting(ProgressBar):
    """Shows nothing, and knows what it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *arguments)
        self.seen.append((self.train_description, self.total_train_batches, *self.get_metrics(trainer, pl_module)))

    def disable(self) -> None:
        pass


class Case(NamedTuple):
    """A fit with a callback.

    Attributes:
        make: Builds the callbacks, given a folder and the model.
        arguments: Of the Trainer.
        model: The model's class.
        logged: Part of a column's name in the CSV logger's file; "": no logger.
        deterministic: What is logged is the same in every run.
    """

    make: Callable[[Path, Any], list[Any]]
    arguments: dict[str, Any] = {}
    model: Any = Whole
    logged: str = ""
    deterministic: bool = True


def _noting(seen: list[int]) -> LambdaCallback:
    callback = LambdaCallback(on_train_batch_end=lambda trainer, *_: seen.append(trainer.global_step))
    callback.seen = seen
    return callback


CASES: dict[str, Case] = {
    "EarlyStopping": Case(
        lambda *_: [EarlyStopping("val_loss", patience=1, min_delta=10.0)],
        {"max_epochs": 5},
    ),
    "LearningRateMonitor": Case(lambda *_: [LearningRateMonitor("step")], logged="lr-Adam"),
    "LearningRateFinder": Case(
        lambda *_: [LearningRateFinder(1e-4, 0.5, num_training_steps=16, early_stop_threshold=None)],
        {"max_epochs": 2},
        Tuned,
    ),
    "LearningRateFinder that stops": Case(
        lambda *_: [LearningRateFinder(1e-4, 1e3, num_training_steps=30, early_stop_threshold=1.5)],
        {"max_epochs": 2},
        Tuned,
    ),
    "GradientAccumulationScheduler": Case(
        lambda *_: [GradientAccumulationScheduler({0: 1, 1: 2})],
        {"max_epochs": 2},
    ),
    "Timer": Case(lambda *_: [Timer(), ModelSummary(2), Watcher()]),
    "LambdaCallback": Case(lambda *_: [_noting([])]),
    "ModelPruning": Case(
        lambda _, model: [ModelPruning("l1_unstructured", [(model.head, "weight")], amount=0.4)],
        {"max_epochs": 3},
    ),
    "SpikeDetection": Case(lambda folder, _: [SpikeDetection(rtol=1e3, exclude_batches_path=str(folder))]),
    "ThroughputMonitor": Case(
        lambda *_: [ThroughputMonitor(lambda batch: len(batch["ids"]), window_size=2)],
        logged="train/samples",
        deterministic=False,
    ),
    "DeviceStatsMonitor": Case(
        lambda *_: [DeviceStatsMonitor()],
        logged="DeviceStatsMonitor.on_train_batch_end",
        deterministic=False,
    ),
    "ProgressBar": Case(lambda *_: [Counting()], {"enable_progress_bar": True}),
    "RichProgressBar": Case(lambda *_: [RichProgressBar()], {"enable_progress_bar": True}),
    "TQDMProgressBar": Case(lambda *_: [TQDMProgressBar()], {"enable_progress_bar": True}),
    "OnExceptionCheckpoint": Case(lambda folder, _: [OnExceptionCheckpoint(folder)], {"enable_checkpointing": True}),
}


def fit(strategy: str, name: str, folder: Path) -> Any:
    """Runs in a worker; what the callbacks may have changed."""
    case = CASES[name]
    model = make_model(cls=case.model)
    callbacks = case.make(folder / strategy, model)
    logger = CSVLogger(str(folder), name=strategy) if case.logged else False
    arguments = {"logger": logger, "log_every_n_steps": 1, **case.arguments}
    trainer = make_trainer(make_strategy(strategy), callbacks=callbacks, default_root_dir=folder, **arguments)
    trainer.fit(model, loader(20 if case.model is Tuned else 3), loader(2, 5))
    seen = [callback.seen for callback in callbacks if hasattr(callback, "seen")]
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return results(model, trainer), trainer.current_epoch, getattr(model, "lr", None), rates, seen


@pytest.mark.parametrize("name", CASES)
def test_equals_ddp(ranks, tmp_path, name):
    """Weights, optimizer states, losses, metrics, learning rates, and what the callback has seen or logged."""
    expected = ranks(2).run(fit, "ddp", name, tmp_path)
    got = ranks(2).run(fit, "embrace", name, tmp_path)
    assert_same(got, expected, tolerance=1e-10)
    if name == "LearningRateFinder":
        assert got[0][2] != 0.01, "the finder found something"
    if CASES[name].logged:
        logs = [(tmp_path / s / "version_0" / "metrics.csv").read_text() for s in ("embrace", "ddp")]
        assert CASES[name].logged in logs[0]
        assert logs[0].splitlines()[0] == logs[1].splitlines()[0]
        if CASES[name].deterministic:
            assert logs[0] == logs[1]


#: ``ddp`` is no reference for these: it never synchronises what is frozen when it begins, nor steps with less than that
FINETUNING: dict[str, tuple[Any, Any]] = {
    "BaseFinetuning that thaws": (Thaw, Whole),
    "BaseFinetuning that freezes": (Freeze, Whole),
    "BackboneFinetuning": (lambda: BackboneFinetuning(1, backbone_initial_lr=0.005), WithBackbone),
}


def finetune(world_size: int, name: str) -> Any:
    """Runs in a worker; one process has all ranks' samples."""
    make, cls = FINETUNING[name]
    model = make_model(cls=cls)
    trainer = make_trainer(
        make_strategy("embrace") if world_size > 1 else "auto", world_size, callbacks=[make()], max_epochs=3
    )
    data = loader(3) if world_size > 1 else DataLoader([concatenated(s) for s in batches(3, 2)], batch_size=None)
    trainer.fit(model, data)
    outcome = results(model, trainer)
    return outcome["state"], outcome["optimizers"], outcome["metrics"]


@pytest.mark.parametrize("name", FINETUNING)
def test_finetuning_equals_one_process(ranks, name):
    """Tables that are frozen for some epochs, from the start or sharded, and thawed into a group of their own."""
    (expected,) = ranks(1).run(finetune, 1, name)
    for outcome in ranks(2).run(finetune, 2, name):
        assert_same(outcome, expected, tolerance=1e-10)


def checkpoints(strategy: str, folder: Path) -> Any:
    """The best two by a metric, and every second step with the last."""
    best = ModelCheckpoint(
        folder / strategy / "best", "{epoch}-{step}", monitor="val_loss", save_top_k=2, save_on_train_epoch_end=False
    )
    often = ModelCheckpoint(folder / strategy / "often", "{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    trainer = make_trainer(make_strategy(strategy), max_epochs=4, callbacks=[best, often], enable_checkpointing=True)
    model = make_model()
    trainer.fit(model, loader(3), loader(2, 5))
    scores = sorted((Path(path).name, float(score)) for path, score in best.best_k_models.items())
    return results(model, trainer), scores, Path(best.best_model_path).name, Path(often.last_model_path).name


def test_model_checkpoint(ranks, tmp_path):
    """The same files with the same contents: whole tables and their optimizer states."""
    expected = ranks(2).run(checkpoints, "ddp", tmp_path)
    assert_same(ranks(2).run(checkpoints, "embrace", tmp_path), expected, tolerance=1e-10)
    ours, theirs = (
        {path.relative_to(tmp_path / s): path for path in (tmp_path / s).rglob("*.ckpt")} for s in ("embrace", "ddp")
    )
    assert sorted(ours) == sorted(theirs) and len(theirs) == 2 + 6 + 1
    for name, path in theirs.items():
        mine, other = (
            {key: plain(c[key]) for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}
            for c in (torch.load(p, weights_only=False) for p in (ours[name], path))
        )
        assert_same(mine, other, str(name), tolerance=1e-10)


class Spike(Whole):
    """Its loss leaps in one step, on one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 1e6 if batch_idx == 4 and this_rank() == 1 else loss


def spike(folder: Path) -> None:
    """Runs in a worker."""
    callback = SpikeDetection(rtol=1e3, exclude_batches_path=str(folder))
    trainer = make_trainer(make_strategy("embrace"), callbacks=[callback], default_root_dir=folder)
    trainer.fit(make_model(cls=Spike), loader(6))


def test_spike_detection_stops_all_ranks(ranks, tmp_path):
    """One rank's loss has leapt: every rank raises, and the file names the batches."""
    outcomes = ranks(2).try_run(spike, tmp_path)
    assert all(not ok and "TrainingSpikeException" in text for ok, text in outcomes), outcomes
    assert (tmp_path / "skip_batches.json").exists()


class Writer(BasePredictionWriter):
    """Writes what this rank has predicted."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self._folder = folder

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *rest: Any) -> None:
        torch.save((prediction, indices), self._folder / f"{trainer.global_rank}-{rest[1]}.pt")

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        torch.save((predictions, indices), self._folder / f"{trainer.global_rank}.pt")


def predict(strategy: str, folder: Path) -> None:
    """Runs in a worker, with a look-up in a table that was sharded before."""
    (folder / strategy).mkdir(exist_ok=True)
    model = make_model()
    trainer = make_trainer(make_strategy(strategy), callbacks=[Writer(folder / strategy)])
    trainer.fit(model, loader(3))
    trainer.predict(model, loader(2, 5))


def test_prediction_writer(ranks, tmp_path):
    """Each rank writes its own predictions."""
    for strategy in ("ddp", "embrace"):
        ranks(2).run(predict, strategy, tmp_path)
    files = sorted(path.name for path in (tmp_path / "ddp").iterdir())
    assert len(files) == 6
    for name in files:
        ours, theirs = (torch.load(tmp_path / s / name, weights_only=False) for s in ("embrace", "ddp"))
        assert_same(ours, theirs, name, tolerance=1e-10)


def refused(folder: Path, kind: str) -> None:
    """Runs in a worker."""
    model = make_model()
    callback = BatchSizeFinder() if kind == "finder" else ModelPruning("l1_unstructured")
    trainer = make_trainer(make_strategy("embrace"), callbacks=[callback], default_root_dir=folder)
    trainer.fit(model, loader(3))


@pytest.mark.parametrize(
    ("kind", "said", "cure"),
    [
        ("finder", "refuses it under every distributed strategy", "Trainer(devices=1, strategy='auto')"),
        ("pruning", "ModelPruning would prune words, bags", "EmbRaceStrategy(tables=['*', '!words', '!bags'])"),
    ],
)
def test_refused_on_every_rank(ranks, tmp_path, kind, said, cure):
    """Before anything is trained, with what to do instead."""
    outcomes = ranks(2).try_run(refused, tmp_path, kind)
    for ok, text in outcomes:
        assert not ok and "MisconfigurationException" in text and said in text and cure in text, text
