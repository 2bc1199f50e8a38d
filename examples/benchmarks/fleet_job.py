"""Models for the benchmark of fleets, and what is noted while they train: under a fleet, or plainly side by side.

::

    python examples/benchmarks/fleet_job.py '{"steps": 5}' 1 /tmp/notes/a /tmp/begin 2

trains one plainly on one thread, beginning when two such processes do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from examples.benchmarks.compute import BlockTime, Timed  # noqa: E402
from examples.benchmarks.own_ranks import TRAINER  # noqa: E402
from examples.benchmarks.spilled_gpt import SpilledGPT, batches, parameters_of  # noqa: E402
from lightning_embrace import Task  # noqa: E402

#: of a Trainer in a fleet, which chooses the other ones
OWN = {name: value for name, value in TRAINER.items() if name not in ("accelerator", "devices")}


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        dim: Width. Of the GPT (:class:`~examples.benchmarks.spilled_gpt.SpilledGPT`), with the next four.
        layers: Blocks.
        vocabulary: V.
        length: Tokens of a sequence.
        sequences: In a batch.
        steps: Batches.
        sleep: Seconds that a block's forward takes without using the CPU; its backward takes twice as many. 0: they
            compute.
    """

    dim: int = 256
    layers: int = 40
    vocabulary: int = 500
    length: int = 64
    sequences: int = 2
    steps: int = 20
    sleep: float = 0.0

    @property
    def nbytes(self) -> int:
        """Of its parameters."""
        if self.sleep:
            return 4 * self.layers * self.dim**2
        return 4 * parameters_of(self.dim, self.layers, self.vocabulary, self.length)

    def build(self) -> LightningModule:
        """The model."""
        if self.sleep:
            return Sleeping(self)
        return SpilledGPT(self.dim, self.layers, self.vocabulary, self.length, "sgd")

    def loader(self) -> DataLoader[Tensor]:
        """Its batches."""
        if self.sleep:
            data: Any = [torch.ones(1, self.dim)] * self.steps
        else:
            data = batches(self.steps, self.sequences, self.length, self.vocabulary)
        return DataLoader(data, batch_size=None)

    def task(self, name: str, notes: Path, begin: Path, together: int) -> Task:
        """For a fleet.

        Args:
            name: Its name.
            notes: See :class:`Notes`, with the next two.
            begin: A folder.
            together: How many begin at once.
        """
        arguments = {**OWN, "max_epochs": 1, "callbacks": [Notes(notes / name, begin, together)]}
        return Task(self.build, self.loader, arguments, name)


class Sleeping(LightningModule):
    """Blocks that take their time, as if each device were an accelerator. Its numbers mean nothing."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Sleeper(sizes.dim, BlockTime(sizes.sleep, 2 * sizes.sleep)) for _ in range(sizes.layers)
        )
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        loss = batch.square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Sleeper(nn.Module):
    """Has weights, and time that it takes."""

    def __init__(self, dim: int, times: BlockTime) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim, dim), 1 / dim))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Timed.apply(self.times, x * self.weight[0].mean(), self.weight)  # type: ignore[no-untyped-call]
        return result


class Notes(Callback):
    """Writes when batches began and ended, on a clock that all processes have, and their losses.

    Args:
        path: The file.
        begin: A folder in which those that begin together meet.
        together: How many.
    """

    def __init__(self, path: Path, begin: Path, together: int) -> None:
        self.path, self.begin, self.together = path, begin, together
        self.began: list[float] = []
        self.ended: list[float] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """The model is built; waits for the others'."""
        self.begin.mkdir(parents=True, exist_ok=True)
        (self.begin / str(os.getpid())).touch()
        while len(os.listdir(self.begin)) < self.together:
            time.sleep(0.002)

    def on_train_batch_start(self, *_: Any) -> None:
        """It has a device."""
        self.began.append(time.monotonic())

    def on_train_batch_end(self, *_: Any) -> None:
        """The optimizer has stepped."""
        self.ended.append(time.monotonic())

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """The model is still spilled."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"began": self.began, "ended": self.ended, "losses": module.losses}))


def train_plainly(model: Model, threads: int, notes: Path, begin: Path, together: int) -> None:
    """In this process."""
    torch.set_num_threads(threads)
    seed_everything(0, verbose=False)
    callbacks = [Notes(notes, begin, together)]
    Trainer(**TRAINER, max_epochs=1, callbacks=callbacks).fit(model.build(), model.loader())


def start_plain(model: Model, names: Sequence[str], threads: int, folder: Path) -> None:
    """Trains models side by side, each in a process of its own, and waits for them.

    Args:
        model: What each of them is.
        names: Of the files with notes, in ``folder / "notes"``.
        threads: Of each.
        folder: For files.

    Raises:
        RuntimeError: One has failed.
    """
    make = partial(subprocess.Popen, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, stderr=subprocess.PIPE)
    arguments = [json.dumps(asdict(model)), str(threads)]
    running = [
        make([sys.executable, __file__, *arguments, folder / "notes" / name, folder / "begin", str(len(names))])
        for name in names
    ]
    for process in running:
        _, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"plain training has failed:\n{errors.decode()[-3000:]}")


if __name__ == "__main__":
    train_plainly(Model(**json.loads(sys.argv[1])), int(sys.argv[2]), *map(Path, sys.argv[3:5]), int(sys.argv[5]))
