"""What peers without a Trainer share."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torch.optim import SGD, Optimizer


def without_trainer(model: LightningModule) -> LightningModule:
    """Lets ``training_step`` run outside a Trainer: what it logs goes nowhere."""
    model.log = model.log_dict = _nowhere  # type: ignore[method-assign,assignment]
    return model


def _nowhere(*_: Any, **__: Any) -> None:
    """Takes what ``log`` takes."""


def optimizer_of(model: LightningModule) -> Optimizer:
    """The model's one optimizer."""
    optimizer = model.configure_optimizers()
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"One optimizer is needed, the model configures {type(optimizer).__name__}.")
    return optimizer


def sgd_rate(optimizer: Optimizer) -> float:
    """The learning rate of an optimizer that must be SGD and nothing more."""
    group = optimizer.param_groups[0]
    plain = isinstance(optimizer, SGD) and len(optimizer.param_groups) == 1
    if not plain or any(group[key] for key in ("momentum", "weight_decay", "nesterov", "maximize")):
        raise TypeError(f"Plain SGD is needed, the model configures {optimizer}.")
    rate: float = group["lr"]
    return rate
