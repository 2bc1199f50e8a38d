"""Tasks that fleets train; their parts are importable, so that processes of their own find them."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

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


class Wide(Noisy):
    """Has a block of another size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks.append(nn.Sequential(nn.Linear(zoo.WIDTH, width), nn.Linear(width, zoo.WIDTH)))


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


class Data(LightningDataModule):
    """The same data."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        return loaders()[0]

    def val_dataloader(self) -> DataLoader[Tensor]:
        return loaders()[1]


class Own(Noisy):
    """Has its own data."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        return loaders()[0]

    def val_dataloader(self) -> DataLoader[Tensor]:
        return loaders()[1]


class Drawing(Dataset[Tensor]):
    """Augments what it has, in loaders' processes."""

    def __init__(self, steps: int) -> None:
        self.items = zoo.batches(steps)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        x, y = self.items[index]
        return x + 0.1 * torch.randn_like(x), y


def data(kind: str) -> Any:
    """By where it comes from."""
    train, val = loaders()
    if kind == "datamodule":
        return Data()
    if kind == "own":
        return None
    if kind == "stateful":
        return StatefulDataLoader(train.dataset, batch_size=None, shuffle=True), val
    if kind == "workers":
        return DataLoader(Drawing(8), batch_size=None, shuffle=True, num_workers=1), val
    return train, val


class Slow(Callback):
    """Takes a while for each batch."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.05)


class Together(Callback):
    """Begins its first batch when others do: fast tasks would be over before the last one has started.

    Args:
        folder: For a file from each of them.
        count: How many begin together.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count

    def on_train_start(self, *_: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / str(os.getpid())).touch()
        deadline = time.monotonic() + 60
        while len(os.listdir(self.folder)) < self.count and time.monotonic() < deadline:
            time.sleep(0.01)


class At(Callback):
    """Does something at a step, in the middle of a backward pass.

    Args:
        step: After so many steps.
        what: ``"raise"``, ``"kill"``, ``"hang"``, ``"memory"``, ``"exit"``.
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
