"""What checkpoints take of memory, in a process of its own: ``python -m tests.hydra.peak FOLDER MODE``.

Modes: ``file`` and ``folder`` save, ``read`` saves what somebody is given whole, ``load`` goes on from a file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_embrace import HydraStrategy
from lightning_embrace.checkpoint import stored
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


class Save(Callback):
    """Saves once the steps are over."""

    def __init__(self, path: Path, taken: dict[str, int]) -> None:
        self.path, self.taken = path, taken

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.strategy._session.settle()
        with measured(self.taken, "saving"):
            trainer.save_checkpoint(self.path)


class Watched(HydraStrategy):
    """Measures what loading takes."""

    taken: dict[str, int]

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        with measured(self.taken, "weights"):
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        with measured(self.taken, "states"):
            super().load_optimizer_state_dict(checkpoint)


@contextmanager
def measured(taken: dict[str, int], name: str) -> Iterator[None]:
    """Notes by how much memory grows inside, at most."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status("VmRSS")
    yield
    taken[name] = status("VmHWM") - before


def status(name: str) -> int:
    """Bytes that the kernel says of this process."""
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def fit(folder: Path, mode: str, taken: dict[str, int], steps: int, from_: Path | None = None) -> HydraStrategy:
    """Trains, and saves then."""
    model = Wide()
    if mode == "read":
        model.blocks[0]._register_state_dict_hook(lambda *_: None)
    kind = "sharded" if mode == "folder" else "full"
    sizes = {"device_memory": "70MiB", "host_memory": "1MiB", "disk": folder / "disk"}
    strategy = Watched(**sizes, state_dict_type=kind)
    strategy.taken = taken
    callbacks = [] if from_ else [Save(folder / "a.ckpt", taken)]
    trainer = Trainer(**{**QUIET, "max_steps": steps, "max_epochs": -1}, strategy=strategy, callbacks=callbacks)
    trainer.fit(model, DataLoader([torch.ones(2, WIDTH)] * 3, batch_size=None), ckpt_path=from_)
    return strategy


def main(folder: Path, mode: str) -> None:
    """Prints what was taken, and how many blocks were on the disk."""
    torch.set_num_threads(1)
    stored.BLOCK_BYTES = 4 << 20  # what is held of a folder; in earnest a shard is larger than 64 MB
    taken: dict[str, int] = {}
    strategy = fit(folder, mode, taken, 3)
    if mode == "load":
        taken.clear()
        strategy = fit(folder, mode, taken, 4, from_=folder / "a.ckpt")
    assert strategy.planned is not None
    spilled = sum(place == "disk" for place in strategy.planned.plan.places)
    written = sum(f.stat().st_size for f in (folder, *folder.rglob("*")) if f.is_file())
    print(json.dumps({"taken": taken, "written": written, "spilled": spilled}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
