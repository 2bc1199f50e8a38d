"""Tasks that fleets train; their parts are importable, so that processes of their own find them."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_embrace.fleet.task import Task
from tests.hydra import zoo

LOSSES = "losses.txt"
#: of a device with two seats: shards move on each
MEMORY = "240KiB"


class Noisy(zoo.Random):
    """Dropout and random numbers of Python and NumPy, validated as well."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(partial(torch.optim.AdamW, lr=lr))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch))


class Record(Callback):
    """Writes each step's loss, bit by bit, and each validation's, as soon as it is known."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self._write(trainer, f"{trainer.global_step} {float(outputs['loss']).hex()}")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self._write(trainer, f"val-{trainer.global_step} {float(trainer.callback_metrics['val_loss']).hex()}")

    def _write(self, trainer: Any, line: str) -> None:
        with open(Path(trainer.default_root_dir, LOSSES), "a") as file:
            file.write(f"{line}\n")


def loaders(steps: int = 8, shuffle: bool = True) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    """For training and validation."""
    data = zoo.batches(steps + 3)
    return DataLoader(data[:steps], batch_size=None, shuffle=shuffle), DataLoader(data[steps:], batch_size=None)


class At(Callback):
    """Does something at a step, in the middle of a backward pass.

    Args:
        step: After so many steps.
        what: ``"raise"``, ``"kill"``, ``"hang"``, ``"memory"``, ``"exit"``, ``"wait"``.
        once: A file that says that it was done; None: each time.
    """

    def __init__(self, step: int, what: str, once: Path | None = None) -> None:
        self.step, self.what, self.once = step, what, once

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        if trainer.global_step == self.step and not (self.once and self.once.exists()):
            loss.register_hook(self._do)

    def _do(self, gradient: Tensor) -> None:
        if self.once is not None:
            self.once.touch()
        if self.what == "raise":
            raise ZeroDivisionError("a bug of the user's")
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "hang":
            time.sleep(600)
        if self.what == "memory":
            torch.empty(1 << 60)
        if self.what == "exit":
            os._exit(3)


def task(index: int, epochs: int = 2, steps: int = 8, extra: tuple[Callback, ...] = (), **arguments: Any) -> Task:
    """Tasks of unlike lengths, rates and numbers."""
    kwargs = {
        "max_epochs": epochs + index % 2,
        "callbacks": [Record(), *extra],
        "logger": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 1,
        **arguments,
    }
    return Task(partial(Noisy, 0.01 / (index + 1)), partial(loaders, steps), kwargs, f"task {index}")
