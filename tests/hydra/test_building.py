"""Models that are built in ``configure_model``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_embrace.hydra import building, leaving
from lightning_embrace.hydra.building import built_on_disk
from tests.hydra.runs import assert_same, fit, hydra


def in_files(model: nn.Module) -> int:
    """How many of its parameters are mapped files."""
    return sum(p.untyped_storage().filename is not None for p in model.parameters())


class Late(LightningModule):
    """Its blocks have large layers, initialised in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = None
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        if self.blocks is None:
            self.blocks = nn.ModuleList(nn.Linear(520, 520) for _ in range(3))
            nn.init.orthogonal_(self.blocks[1].weight)
            self.blocks[2].weight.data.mul_(0.5)
            self.mapped = in_files(self)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.mapped_in_training = in_files(self)
        for block in self.blocks:
            batch = torch.tanh(block(batch))
        loss = batch.pow(2).mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_numbers_of_plain_construction(tmp_path: Path) -> None:
    """Its parameters are in files while it is built, and in the store afterwards; nothing is left in the folder."""
    made: list[Late] = []

    def make() -> Late:
        made.append(Late())
        return made[-1]

    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(4, 520, generator=generator) for _ in range(3)]
    ours = fit(make, hydra(disk=tmp_path, device_memory="5MiB", host_memory="4KiB"), data)
    assert_same(ours, fit(make, "auto", data))
    assert (made[0].mapped, made[1].mapped) == (3, 0)
    assert made[0].mapped_in_training == 0
    assert in_files(made[0]) == 0 and os.listdir(tmp_path) == []


def test_what_does_not_fit_the_host_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is in mapped files then, with the same numbers, and trains again."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(4, 520, generator=generator) for _ in range(3)]
    strategy = hydra(disk=tmp_path, device_memory="5MiB", host_memory="4KiB")
    monkeypatch.setattr(leaving, "available_bytes", lambda: 1000)
    ours = fit(Late, strategy, data)
    assert in_files(ours.trainer.lightning_module) > 0
    assert_same(ours, fit(Late, "auto", data))
    ours.trainer.fit_loop.max_epochs = 2
    ours.trainer.fit(ours.trainer.lightning_module, DataLoader(data, batch_size=None))


def test_what_fits_does_not_stay_in_files(tmp_path: Path) -> None:
    ours = fit(Late, hydra(disk=tmp_path), [torch.ones(4, 520)] * 2)
    model = ours.trainer.lightning_module
    assert model.mapped == 3 and model.mapped_in_training == 0


def test_small_parameters_stay_in_memory(tmp_path: Path) -> None:
    with built_on_disk(tmp_path):
        layer = nn.Linear(520, 520)
    assert in_files(layer) == 1 and layer.bias.untyped_storage().filename is None


def resident(name: str) -> int:
    """Bytes of this process' memory, from its status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def test_what_was_written_leaves_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model is built, and when all of it is initialised once more; its numbers are there when they are read."""
    monkeypatch.setattr(building, "_TOUCHED", 4 << 20)
    rows = 4096  # 16 MiB each
    before = resident("RssFile")
    torch.manual_seed(0)
    with built_on_disk(tmp_path):
        layers = nn.ModuleList(nn.Embedding(rows, 1024) for _ in range(8))
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.02)
            assert resident("RssFile") - before < 64 << 20
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Embedding(rows, 1024) for _ in range(8))
    for layer, other in zip(layers, plain):
        nn.init.normal_(other.weight, std=0.02)
        assert torch.equal(layer.weight, other.weight)


def test_memory_that_the_user_gives_a_parameter_is_left_alone(tmp_path: Path) -> None:
    with built_on_disk(tmp_path):
        layer = nn.Linear(520, 520)
        layer.weight.data = torch.ones(520, 520)
    assert (layer.weight == 1).all()


def test_what_torch_empty_makes_is_in_a_file_at_once(tmp_path: Path) -> None:
    """And nothing else: small tensors, other devices, what is to have a gradient."""
    with built_on_disk(tmp_path):
        large = torch.empty((1024, 1024), dtype=torch.float16)
        others = [
            torch.empty(9),
            torch.empty(1024, 1024, requires_grad=True),
            torch.zeros(1024, 1024),
            torch.empty(1024, 1024, device="meta"),
        ]
    assert building.is_mapped(large) and large.dtype == torch.float16
    assert not any(building.is_mapped(t) for t in others)
    assert not building.is_mapped(torch.empty(1024, 1024))
