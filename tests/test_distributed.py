"""What the strategy tells Lightning of ranks, devices and process groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_embrace import EmbRaceStrategy
from lightning_embrace.distributed import _backend_for
from lightning_embrace.tables.modules import is_sharded


@pytest.mark.parametrize(
    ("device", "backend", "part"),
    [
        ("cpu", "gloo", "gloo"),
        ("cuda", "nccl", "nccl"),
        ("cuda", "gloo", "gloo"),
        ("cpu", "cpu:gloo,cuda:nccl", "gloo"),
        ("cuda", "cpu:gloo,cuda:nccl", "nccl"),
    ],
)
def test_backend_of_a_device(device: str, backend: str, part: str) -> None:
    """Groups of our own carry tensors of one device only, and their options depend on what carries them."""
    assert _backend_for(torch.device(device), backend) == part


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_default_backend(device: str, backend: str) -> None:
    strategy = EmbRaceStrategy(parallel_devices=[torch.device(device, 0)])
    assert strategy.process_group_backend == backend
    strategy = EmbRaceStrategy(parallel_devices=[torch.device(device, 0)], process_group_backend="gloo")
    assert strategy.process_group_backend == "gloo"


class Noted(nn.Sequential):
    """What the fake plugin wraps a normalisation in."""


class FakeLayerSync(LayerSync):
    """Wraps batch normalisation, as TorchSyncBatchNorm converts it; notes whether the table was whole."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def apply(self, model: nn.Module) -> nn.Module:
        self.calls.append(("apply", not is_sharded(model.table)))  # type: ignore[arg-type]
        model.norm = Noted(model.norm)  # type: ignore[arg-type]
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        self.calls.append(("revert", not is_sharded(model.table)))  # type: ignore[arg-type]
        if isinstance(model.norm, Noted):
            model.norm = model.norm[0]
        return model


class Normalised(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.types: set[type] = set()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.types.add(type(self.norm))
        return self.norm(self.table(batch)).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def synchronise_layers(tables: list[str]) -> tuple[list[tuple[str, bool]], list[str], str, str]:
    """Runs in a worker: fits with the fake plugin."""
    sync, model = FakeLayerSync(), Normalised()
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "logger": False}
    settings |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    error = ""
    try:
        trainer = Trainer(strategy=EmbRaceStrategy(tables=tables), plugins=[sync], **settings)
        trainer.fit(model, DataLoader(torch.arange(8) % 10, batch_size=4))
    except ValueError as raised:
        error = str(raised)
    return sync.calls, [t.__name__ for t in model.types], type(model.norm).__name__, error


def test_layer_sync(ranks: Any) -> None:
    """``sync_batchnorm=True`` sees whole tables, is in force during fit and undone after it."""
    ((calls, types, after, error),) = ranks(1).run(synchronise_layers, ["table"])
    assert (calls, types, after, error) == ([("apply", True), ("revert", True)], ["Noted"], "BatchNorm1d", "")


def test_layer_sync_is_undone_when_setup_fails(ranks: Any) -> None:
    """As under DDP: the model stays the user's whatever happens."""
    ((calls, types, after, error),) = ranks(1).run(synchronise_layers, ["no such table"])
    assert "matches no embedding" in error
    assert (calls, types, after) == ([("apply", True), ("revert", True)], [], "BatchNorm1d")
