"""A LightningModule with every step, and Trainers for it, for tests that compare the life cycle with plain DDP."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_embrace import EmbRaceStrategy
from tests.support.models import OPTIMIZERS, VOCABULARY, batches
from tests.support.training import QUIET


def make_strategy(name: str, **arguments: Any) -> Any:
    """``"embrace"`` shards every table, whatever its size; anything else is Lightning's."""
    return EmbRaceStrategy(**{"tables": ["*"], **arguments}) if name == "embrace" else name


def this_rank() -> int:
    """The rank of the worker that runs this."""
    return int(os.environ["LOCAL_RANK"])


class Whole(LightningModule):
    """Two tables, a head and a buffer that counts steps; every kind of step, a scheduler, logged metrics."""

    def __init__(self, columns: int = 5, sparse: bool = False, optimizer: str = "adam") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.words = nn.Embedding(VOCABULARY, columns, sparse=sparse, padding_idx=0)
        self.bags = nn.EmbeddingBag(VOCABULARY, columns, sparse=sparse, mode="mean")
        # an optimizer for sparse gradients trains the tables alone, Lightning takes only one
        self.head = nn.Linear(columns, 1)
        self.head.requires_grad_(optimizer != "sparseadam")
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.losses: list[float] = []
        self.evaluated: list[float] = []
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(ids).mean(1) + self.bags(ids))).squeeze(1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return (self(batch["ids"]) - batch["target"]).pow(2).mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.steps += 1
        self.log("loss", loss, sync_dist=True)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.evaluated.append(float(loss.detach()))

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch["ids"])

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer = OPTIMIZERS[self.hparams["optimizer"]](parameters)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


def loader(steps: int, seed: int = 0, world_size: int = 2) -> DataLoader[Any]:
    """This rank's ready batches."""
    mine = [step[this_rank()] for step in batches(steps, world_size, seed=seed)]
    return DataLoader(mine, batch_size=None, shuffle=False)  # type: ignore[arg-type]


def make_trainer(strategy: Any, world_size: int = 2, **arguments: Any) -> Trainer:
    """A quiet Trainer on the workers of a pool."""
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": world_size,
            "strategy": strategy,
            **QUIET,
            **arguments,
        }
    )


def make_model(*arguments: Any, seed: int = 1, cls: Callable[..., Any] = Whole, **named: Any) -> Any:
    """The same weights on every rank and in every run."""
    seed_everything(seed, verbose=False)
    return cls(*arguments, **named)


class At(Callback):
    """Calls ``action(trainer, module)`` in the hook of that name, every time or at one count of it."""

    def __init__(self, hook: str, action: Callable[[Any, Any], Any], count: int | None = None) -> None:
        self.results: list[Any] = []
        self._calls = 0

        def call(trainer: Any, module: Any, *_: Any) -> None:
            self._calls += 1
            if count is None or self._calls == count:
                self.results.append(action(trainer, module))

        setattr(self, hook, call)


def plain(state: Any) -> Any:
    """State dicts as they can be compared: sparse tensors dense."""
    if isinstance(state, Tensor):
        return state.detach().to_dense() if state.is_sparse else state.detach().clone()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(plain(value) for value in state)
    return state


def results(model: Any, trainer: Any) -> dict[str, Any]:
    """What a fit leaves behind on a rank."""
    return {
        "state": plain(dict(model.state_dict())),
        "optimizers": [plain(o.state_dict()) for o in trainer.optimizers],
        "losses": model.losses,
        "evaluated": model.evaluated,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
    }


def assert_same(ours: Any, theirs: Any, where: str = "", tolerance: float = 1e-12) -> None:
    """Same structure, types, shapes, dtypes and values."""
    assert type(ours) is type(theirs), f"{where}: {type(ours)} is not {type(theirs)}"
    if isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype and ours.layout == theirs.layout, where
        assert ours.shape == theirs.shape, f"{where}: {tuple(ours.shape)} is not {tuple(theirs.shape)}"
        ours, theirs = plain(ours), plain(theirs)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, msg=lambda m: f"{where}: {m}")
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), f"{where}: keys {list(ours)} are not {list(theirs)}"
        assert getattr(ours, "_metadata", None) == getattr(theirs, "_metadata", None), where
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{where}[{key!r}]", tolerance)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for number, (left, right) in enumerate(zip(ours, theirs)):
            assert_same(left, right, f"{where}[{number}]", tolerance)
    elif isinstance(theirs, float):
        assert abs(ours - theirs) <= tolerance, f"{where}: {ours} is not {theirs}"
    else:
        assert ours == theirs, f"{where}: {ours!r} is not {theirs!r}"
