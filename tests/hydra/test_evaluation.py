"""Validate, test and predict, within a fit and by themselves: without a tape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from tests.hydra import zoo
from tests.hydra.runs import QUIET, hydra

#: two shards at a time, also where nothing is trained
BUDGET = "55KiB"


class Evaluated(zoo.Random):
    """Looks at itself in every hook that may, and counts the runs of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.runs = 0
        for block in self.blocks:
            block.body.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.runs += 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        before = self.runs
        self.seen.append(self.loss(*batch).detach())
        assert self.runs - before == len(self.blocks)
        assert all(p.grad is None or p.grad.isnan().all() for b in self.blocks for p in b.parameters())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def on_validation_end(self) -> None:
        self.seen.append({k: v.clone() for k, v in self.state_dict().items()})

    on_test_end = on_validation_end


def evaluated(strategy: Any, inference_mode: bool) -> list[Any]:
    """All that the model has seen, and what was spilled meanwhile."""
    seed_everything(1, verbose=False)
    model, loader = Evaluated(), DataLoader(zoo.batches(4), batch_size=None)
    arguments = {"strategy": strategy, "num_sanity_val_steps": 1, "max_epochs": 2, "inference_mode": inference_mode}
    trainer = Trainer(**{**QUIET, **arguments})
    trainer.fit(model, loader, loader)
    shards = [_shards(strategy)]
    for evaluate in (trainer.validate, trainer.test):
        evaluate(model, loader, verbose=False)
        shards.append(_shards(strategy))
    predicted = trainer.predict(model, loader)
    assert all(shards) and _shards(strategy), "everything was on the device: nothing was shown"
    return [*model.seen, predicted]


def _shards(strategy: Any) -> bool:
    return strategy == "auto" or len(strategy.planned.plan.shards) > strategy.planned.plan.slots


def check(folder: Path | None, prefetch: bool, inference_mode: bool) -> None:
    tier = {"disk": folder, "host_memory": "4KiB"} if folder else {}
    ours = evaluated(hydra(device_memory=BUDGET, prefetch=prefetch, **tier), inference_mode)
    plain = evaluated("auto", inference_mode)
    assert len(ours) == len(plain)
    for mine, other in zip(ours, plain):
        pairs = zip(mine.values(), other.values()) if isinstance(other, dict) else [(mine, other)]
        for left, right in pairs:
            torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize(("tier", "prefetch", "inference_mode"), [("host", True, True), ("disk", False, False)])
def test_evaluation(tier: str, prefetch: bool, inference_mode: bool, tmp_path: Path) -> None:
    """Losses, predictions, and state dicts that somebody asks for meanwhile."""
    check(tmp_path if tier == "disk" else None, prefetch, inference_mode)


@pytest.mark.matrix
@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_everywhere(tier: str, prefetch: bool, inference_mode: bool, tmp_path: Path) -> None:
    check(tmp_path if tier == "disk" else None, prefetch, inference_mode)
