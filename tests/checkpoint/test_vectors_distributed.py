"""Pretrained vectors go into the columns that each rank has, and nobody ever holds a whole table."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_embrace.utilities import load_vectors
from tests.support.lifecycle import At, Whole, assert_same, loader, make_model, make_strategy, make_trainer, plain
from tests.support.models import VOCABULARY
from tests.support.ranks import free_port, run_by_hand
from tests.support.training import QUIET

COLUMNS = 5
VECTORS = torch.randn(VOCABULARY - 2, COLUMNS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Vectors of all but two words."""
    lines = [f"w{i} {' '.join(repr(float(v)) for v in vector)}\n" for i, vector in enumerate(VECTORS)]
    (tmp_path / "vectors.txt").write_text("".join(lines))
    return tmp_path / "vectors.txt"


class Pretrained(Whole):
    """Its tables are filled in ``configure_model``."""

    def __init__(self, path: str, when: str) -> None:
        super(Whole, self).__init__()
        self.save_hyperparameters({"optimizer": "adam", "columns": COLUMNS, "sparse": False})
        self.path, self.when, self.head = path, when, None
        self.losses: list[float] = []
        self.evaluated: list[float] = []
        self.results: list[Any] = []
        if when != "configure_model":
            self.build()

    def build(self) -> None:
        self.words = nn.Embedding(VOCABULARY, COLUMNS, padding_idx=0)
        self.bags = nn.EmbeddingBag(VOCABULARY, COLUMNS, mode="mean")
        self.head = nn.Linear(COLUMNS, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.double()

    def load(self) -> None:
        vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
        self.results = [load_vectors(table, self.path, vocabulary) for table in (self.words, self.bags)]

    def configure_model(self) -> None:
        if self.head is None:
            self.build()
            self.load()

    def on_fit_start(self) -> None:
        if self.when == "on_fit_start":
            self.load()


def fit(strategy: str, path: str, when: str, world_size: int) -> Any:
    seed_everything(1, verbose=False)
    model = Pretrained(path, when)
    if when == "before":
        model.load()
    shapes = At("on_fit_start", lambda _, module: tuple(module.words._parameters["weight"].shape))
    trainer = make_trainer(make_strategy(strategy), world_size, callbacks=[shapes])
    trainer.fit(model, loader(3, 0, world_size))
    state = trainer.strategy.full_state_dict() if strategy == "embrace" else model.state_dict()
    return plain(dict(state)), model.losses, model.results, shapes.results


@pytest.mark.parametrize(("when", "world_size"), [("before", 2), ("configure_model", 3), ("on_fit_start", 2)])
def test_trains_as_ddp(ranks, path, when, world_size):
    """From the same vectors, wherever they are read: into whole tables, or into columns."""
    expected = ranks(world_size).run(fit, "ddp", str(path), when, world_size)
    for (state, losses, results, shapes), theirs in zip(
        ranks(world_size).run(fit, "embrace", str(path), when, world_size), expected
    ):
        assert_same((state, losses), theirs[:2])
        assert results == theirs[2] and results[0].missing == ("w21", "w22")
        assert results[0].found == VOCABULARY - 3 and results[1].found == VOCABULARY - 2  # padding stays
        assert shapes[0][1] < COLUMNS


def inside(path: str) -> None:
    model = make_model()
    step = model.training_step

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        with pytest.raises(RuntimeError, match="was read inside a step"):
            load_vectors(model.words, path, {"w1": 1})
        return step(batch, batch_idx)

    model.training_step = training_step
    make_trainer(make_strategy("embrace")).fit(model, loader(1))


def test_not_inside_a_step(ranks, path):
    ranks(2).run(inside, str(path))


LIMIT = 320 << 20
WIDTH = 64
ROWS = int(0.8 * LIMIT) // (WIDTH * 4)


class Large(LightningModule):
    """A table of 80 % of the limit, filled from a file."""

    def __init__(self, path: str, words: Any) -> None:
        super().__init__()
        self.path, self.words, self.table = path, words, None
        self.found = 0

    def configure_model(self) -> None:
        if self.table is None:
            self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
            self.found = load_vectors(self.table, self.path, self.words).found

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return self.table(ids).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_under_limit(path: str) -> Any:
    """Takes the limit for what this process will allocate from now on."""
    seed_everything(0, verbose=False)
    model = Large(path, None if path.endswith(".npy") else {f"w{i}": i for i in range(0, 2000, 2)})
    with open("/proc/self/status") as lines:
        used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + LIMIT, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    batches = [torch.arange(8) * 1000 + 1 for _ in range(2)]
    trainer = Trainer(accelerator="cpu", devices=2, strategy="embrace", **QUIET)
    trainer.fit(model, DataLoader(batches, batch_size=None))
    return model.found, model.table.weight[2, :2].tolist()


@pytest.mark.parametrize("format", ["npy", "text"])
def test_never_a_whole_table(tmp_path, format):
    """Each of two ranks may take 320 MiB, of which its columns are 128: beside them fits no whole of 256 MiB."""
    path = tmp_path / ("vectors.npy" if format == "npy" else "vectors.txt")
    if format == "npy":
        array = np.lib.format.open_memmap(path, "w+", dtype="f4", shape=(ROWS, WIDTH))  # a hole in the file
        array[2] = range(WIDTH)
        array.flush()
    else:
        numbers = " ".join(str(float(column)) for column in range(WIDTH))
        with path.open("w") as file:
            file.writelines(f"w{i} {numbers}\n" for i in range(2000))
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    environments = [{**common, "LOCAL_RANK": str(rank)} for rank in range(2)]
    found = ROWS if format == "npy" else 1000
    assert run_by_hand(environments, train_under_limit, str(path)) == [(found, [0.0, 1.0]), (found, [32.0, 33.0])]
    os.remove(path)
