"""Fits a model twice, plainly and under Hydra, and compares every number."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_embrace import HydraStrategy

STEPS = 20
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Run(NamedTuple):
    """What a fit leaves behind."""

    losses: list[float]
    model: dict[str, Tensor]
    optimizer: list[Any]
    trainer: Trainer


def fit(make: Callable[[], LightningModule], strategy: Any, data: list[Any], **arguments: Any) -> Run:
    """Builds and fits a model with the same random numbers whatever the strategy."""
    seed_everything(3, verbose=False)
    model = make()
    trainer = Trainer(**{**QUIET, "strategy": strategy, **arguments})
    trainer.fit(model, DataLoader(data, batch_size=None, shuffle=False))
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    states = [copy.deepcopy(o.state_dict()) for o in trainer.optimizers]
    return Run([float(x) for x in model.losses], state, states, trainer)


def assert_same(ours: Run, plain: Run, tolerance: float = 0.0) -> None:
    """Losses, parameters, buffers and optimizer states; bit by bit unless a tolerance is given."""

    def same(left: Any, right: Any, where: str) -> None:
        if isinstance(right, Tensor):
            assert left.dtype == right.dtype and left.shape == right.shape, where
            torch.testing.assert_close(
                left, right, rtol=0, atol=tolerance, equal_nan=True, msg=lambda m: f"{where}: {m}"
            )
        elif isinstance(right, dict):
            assert left.keys() == right.keys(), where
            for key in right:
                same(left[key], right[key], f"{where}[{key!r}]")
        elif isinstance(right, (list, tuple)):
            assert len(left) == len(right), where
            for index, (a, b) in enumerate(zip(left, right)):
                same(a, b, f"{where}[{index}]")
        elif isinstance(right, float):
            assert left == right or abs(left - right) <= tolerance or (left != left and right != right), where
        else:
            assert left == right, where

    assert len(plain.losses) > 0
    same(ours.losses, plain.losses, "losses")
    same(ours.model, plain.model, "model")
    same(ours.optimizer, plain.optimizer, "optimizer")


def hydra(**arguments: Any) -> HydraStrategy:
    """The strategy under test."""
    return HydraStrategy(**arguments)


def refuse_direct_access(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no file system has O_DIRECT."""
    real_open = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
