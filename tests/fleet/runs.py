"""Trains tasks plainly, and compares with what a fleet has made of them."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything

from lightning_embrace.fleet.fleet import HydraFleet
from lightning_embrace.fleet.layout import CHECKPOINT
from lightning_embrace.fleet.task import Task
from tests.fleet import zoo
from tests.hydra.runs import Run
from tests.hydra.runs import assert_same as assert_same_run


def plain(task: Task, folder: Path, seed: int = 0) -> Run:
    """The task in an ordinary Trainer, on one thread."""
    seed_everything(seed, verbose=False)
    factory = cloudpickle.loads(cloudpickle.dumps(task.factory))
    module = factory if isinstance(factory, LightningModule) else factory()
    data = task.loaders() if callable(task.loaders) else task.loaders
    train, val = data if isinstance(data, tuple) else (None, None)
    datamodule = data if isinstance(data, LightningDataModule) else None
    callbacks = [
        copy.deepcopy(c) for c in task.trainer_kwargs["callbacks"] if not isinstance(c, (zoo.At, zoo.Together))
    ]
    arguments = {"enable_progress_bar": False, "enable_checkpointing": False, **task.trainer_kwargs}
    folder.mkdir(parents=True)
    trainer = Trainer(
        **{**arguments, "callbacks": callbacks}, accelerator="cpu", devices=1, default_root_dir=str(folder)
    )
    trainer.fit(module, train, val, datamodule)
    trainer.save_checkpoint(folder / CHECKPOINT)
    return of(folder)


def of(folder: Path) -> Run:
    """What a task has left: what it wrote of a step last, and its checkpoint."""
    lines = dict(line.split() for line in (folder / zoo.LOSSES).read_text().splitlines())
    content = torch.load(folder / CHECKPOINT, weights_only=False)
    losses = [float.fromhex(loss) for _, loss in sorted(lines.items())]
    return Run(losses, content["state_dict"], content["optimizer_states"], None)  # type: ignore[arg-type]


def assert_as_plain(fleet: HydraFleet, names: list[str], folder: Path) -> None:
    """Losses of each step and validation, parameters and the optimizer's states, bit by bit."""
    for name in names:
        if not (folder / name).exists():
            plain(fleet.tasks[name], folder / name)
        assert_same_run(of(fleet.config.folder / name), of(folder / name))


def fleet_of(tasks: list[Task], folder: Path, **arguments: Any) -> HydraFleet:
    """With one thread for each task."""
    return HydraFleet(tasks, **{"memory": zoo.MEMORY, "folder": folder, "threads": 1, **arguments})


def assert_nothing_left(folder: Path) -> None:
    """No process of a fleet, and no file that is being made."""
    left = [pid for pid in os.listdir("/proc") if pid.isdigit() and _is_worker(pid)]
    assert not left, f"processes are left: {left}"
    assert [p for p in folder.rglob(".*")] == []


def _is_worker(pid: str) -> bool:
    """A child of this process, or one that nobody has, with a task."""
    try:
        parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return int(parts[1]) in (1, os.getpid()) and b"lightning_embrace.fleet.worker" in command
