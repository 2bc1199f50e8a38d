"""Models from Lightning's own documentation train when the strategy's name is changed, and nothing else."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer, WikiText2
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_embrace  # noqa: F401  (registers the strategies)
from tests.support.training import QUIET

WORDS, LINES = 2600, 60  # tables of more than 1 MiB: large enough for the default `tables="auto"`
USERS, MOVIES = 9000, 5000


class LanguageModel(L.LightningModule):
    """The user guide's: the model is made in `configure_model`."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Transformer(vocab_size=self.vocab_size, nlayers=1, dropout=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        input, target = batch
        output = self.model(input, target)
        loss = F.nll_loss(output, target.view(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> Any:
        return DataLoader(WikiText2(download=False), batch_size=2)


class Recommender(L.LightningModule):
    """Two towers whose product is a rating, as tutorials on recommendation have it."""

    def __init__(self, users: int = USERS, movies: int = MOVIES, dim: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.user_embedding = nn.Embedding(users, dim)
        self.movie_embedding = nn.Embedding(movies, dim)
        self.user_tower = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 16))
        self.movie_tower = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, users: Tensor, movies: Tensor) -> Tensor:
        return (self.user_tower(self.user_embedding(users)) * self.movie_tower(self.movie_embedding(movies))).sum(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        users, movies, ratings = batch
        loss = F.mse_loss(self(users, movies), ratings)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        users, movies, ratings = batch
        self.log("val_loss", F.mse_loss(self(users, movies), ratings), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(ratings(0), batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(ratings(1), batch_size=8)


def ratings(seed: int) -> TensorDataset:
    """Who has rated what, and how."""
    generator = torch.Generator().manual_seed(seed)
    users, movies = (torch.randint(0, size, (64,), generator=generator) for size in (USERS, MOVIES))
    return TensorDataset(users, movies, torch.rand(64, generator=generator) * 5)


#: name: model, steps, what a table must be called that is sharded
CASES: dict[str, tuple[Any, int, list[str]]] = {
    "transformer": (lambda: LightningTransformer(vocab_size=WORDS + 1), 2, ["model.embedding"]),
    "transformer made in configure_model": (lambda: LanguageModel(WORDS + 1), 2, ["model.embedding"]),
    "lstm": (lambda: LightningLSTM(vocab_size=WORDS + 1), 2, ["model.encoder"]),
    "recommender": (lambda: Recommender(), 4, ["user_embedding", "movie_embedding"]),
}


@contextmanager
def at(folder: Path) -> Iterator[None]:
    """Lightning's data set looks for its text below the current folder, and downloads it only if it is not there."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def write_text(folder: Path) -> None:
    """A text with every word at least once."""
    words = [f"w{n}" for n in range(WORDS)]
    random.Random(0).shuffle(words)
    (folder / "data").mkdir()
    size = WORDS // LINES
    rows = [" ".join(words[start : start + size]) for start in range(0, WORDS, size)]
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(rows))


def fit(strategy: str, case: str, folder: Path) -> Any:
    """Runs in a worker, exactly as the documentation has it: a model, and a Trainer with a strategy's name."""
    make, steps, names = CASES[case]
    with at(folder):
        L.seed_everything(42, verbose=False)
        model = make()
        seen: list[str] = []
        # the LSTM's batch sampler is one that Lightning cannot make anew, under any strategy
        arguments = {**QUIET, "use_distributed_sampler": case != "lstm", "default_root_dir": folder}
        trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, **arguments)

        state: dict[str, Tensor] = {}

        class Look(L.Callback):
            def on_train_end(self, trainer: Any, module: Any) -> None:
                if strategy == "embrace":
                    seen.extend(table.name for table in trainer.strategy._session.tables)
                    state.update(trainer.strategy.full_state_dict())  # what was built as columns stays so afterwards
                else:
                    state.update(module.state_dict())

        trainer.callbacks.append(Look())
        trainer.fit(model)
    assert seen == (names if strategy == "embrace" else [])
    return {k: v.detach().clone() for k, v in state.items()}, {k: float(v) for k, v in trainer.callback_metrics.items()}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.matrix] * (c == "lstm")) for c in CASES])
def test_equals_ddp(ranks, tmp_path, case):
    """The same weights (fp32) after the same batches with the same dropout."""
    write_text(tmp_path)
    (theirs, their_metrics), *_ = ranks(2).run(fit, "ddp", case, tmp_path)
    (ours, metrics), *_ = ranks(2).run(fit, "embrace", case, tmp_path)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert metrics == pytest.approx(their_metrics, rel=1e-4)
