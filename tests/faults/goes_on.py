"""A training run that saves, and goes on from what it has saved, until it is over. Also a script, for torchrun."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_embrace import EmbRaceStrategy, last_whole_checkpoint
from lightning_embrace.checkpoint import archive
from tests.faults.victim import Harm
from tests.support.training import QUIET

ROWS, STEPS, EVERY = 3000, 8, 2
#: moments at which a rank can come to harm: "train" is a forward pass, "rename" comes before a checkpoint has its name
MOMENTS = ("load", "train", "save", "write", "rename")
At = Callable[[str], None]


class Batches:
    """Ids that depend on rank and step; goes on where it was."""

    def __init__(self, steps: int) -> None:
        self.steps, self.position = steps, 0

    def __iter__(self) -> Iterator[Tensor]:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        while self.position < self.steps:
            self.position += 1
            generator = torch.Generator().manual_seed(1000 * self.position + rank)
            yield torch.randint(ROWS, (6,), generator=generator)
        self.position = 0

    def __len__(self) -> int:
        return self.steps

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Story(LightningModule):
    """Two tables and a head, in fp64; Adam has a state for each row."""

    def __init__(self, at: At) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.at = at
        self.words = nn.Embedding(ROWS, 7)
        self.tags = nn.Embedding(ROWS, 4)
        self.head = nn.Linear(11, 1)
        self.double()

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        self.at("train")
        return self.head(torch.cat([self.words(ids), self.tags(ids)], dim=-1)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": rates, "interval": "step"}]


def _before(owner: Any, name: str, moment: str, at: At, when: Callable[..., bool] = lambda *_, **__: True) -> None:
    """Has ``at`` called with the moment whenever a function begins."""
    function = getattr(owner, name)

    def begin(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            at(moment)
        return function(*args, **kwargs)

    setattr(owner, name, begin)


def _tell(at: At) -> None:
    """Has every moment told, in this process."""
    _before(EmbRaceStrategy, "load_checkpoint", "load", at)
    _before(EmbRaceStrategy, "save_checkpoint", "save", at)
    _before(archive._Records, "write_record", "write", at)
    _before(torch.distributed.checkpoint.filesystem, "_write_item", "write", at)
    for name in ("rename", "replace"):
        _before(os, name, "rename", at, lambda _, to: str(to).endswith(".ckpt"))


def run(
    folder: Path,
    harm: Harm,
    devices: int,
    state_dict_type: Any = "full",
    timeout: float = 600.0,
    marks: str | None = None,
) -> None:
    """Trains from the last whole checkpoint in a folder to the end, and leaves what it has come to.

    Args:
        folder: Where it saves.
        harm: At a moment of :data:`MOMENTS`, counted from 0 in each run.
        devices: Number of ranks.
        state_dict_type: As in the strategy.
        timeout: As in the strategy, in seconds.
        marks: A file, or a pipe, that is told the moments of the rank that is to come to harm.
    """
    counts = dict.fromkeys(MOMENTS, 0)
    told = open(marks, "a") if marks and int(os.environ["LOCAL_RANK"]) == harm.rank else None  # noqa: SIM115

    def at(moment: str) -> None:
        if told is not None:
            told.write(f"{moment} {counts[moment]} {time.monotonic()}\n")
            told.flush()
        harm.at(moment, counts[moment])
        counts[moment] += 1

    _tell(at)
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=EVERY, save_top_k=-1, save_last=True)
    strategy = EmbRaceStrategy(
        tables=["*"], state_dict_type=state_dict_type, timeout=timedelta(seconds=timeout), lookahead=_ids
    )
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True},
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=[saver],
    )
    model = Story(at)
    trainer.fit(model, Batches(STEPS), ckpt_path=last_whole_checkpoint(folder))
    if trainer.is_global_zero:
        states = [optimizer.state_dict() for optimizer in trainer.optimizers]
        torch.save({"state_dict": model.state_dict(), "optimizer_states": states}, folder / "end.pt")


def _ids(ids: Tensor) -> dict[str, Tensor]:
    return {"words": ids, "tags": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--moment", choices=MOMENTS, default="train")
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--state-dict-type", default="full")
    arguments = parser.parse_args()
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    harm = Harm(arguments.moment, "kill", -1 if again else arguments.rank, arguments.count)
    run(arguments.folder, harm, arguments.devices, arguments.state_dict_type)


if __name__ == "__main__":
    main()
