"""What saving a spilled model takes of memory, in its own process: ``python -m tests.hydra.peak FOLDER READER``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_embrace import HydraStrategy
from tests.hydra.runs import QUIET

WIDTH, BLOCKS = 1400, 5
SHARD_BYTES = 2 * 4 * WIDTH * (WIDTH + 1)  # weights and momenta of one block


class Wide(LightningModule):
    """Some large blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = torch.tanh(block(batch))
        return batch.pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Read(Callback):
    """Is given a checkpoint's values."""

    def on_save_checkpoint(self, *_: Any) -> None:
        """Reads none of them."""


class Measure(Callback):
    """Saves once the steps are over."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.strategy._session.settle()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = status("VmRSS")
        trainer.save_checkpoint(self.path)
        self.taken = status("VmHWM") - before


def status(name: str) -> int:
    """Bytes that the kernel says of this process."""
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def main(folder: Path, reader: bool) -> None:
    """Prints what saving has taken, and the size of the file."""
    torch.set_num_threads(1)
    measure = Measure(folder / "a.ckpt")
    strategy = HydraStrategy(device_memory="70MiB", host_memory="1MiB", disk=folder / "disk")
    callbacks = [measure, Read()] if reader else [measure]
    trainer = Trainer(**{**QUIET, "max_steps": 3}, strategy=strategy, callbacks=callbacks)
    trainer.fit(Wide(), DataLoader([torch.ones(2, WIDTH)] * 3, batch_size=None))
    spilled = sum(place == "disk" for place in strategy.planned.plan.places)
    print(json.dumps({"taken": measure.taken, "file": os.path.getsize(measure.path), "spilled": spilled}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "read")
