"""The examples' models in a size that trains in no time, and what their tests share."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from examples.benchmarks.compute import set_compute, spread
from examples.benchmarks.data import StepBatches, Zipf, words_of
from examples.models.registry import BatchSpec, batch_spec, build
from lightning_embrace import EmbRaceStrategy
from tests.support.training import train

_TINY: dict[str, dict[str, Any]] = {
    "lm": {"layers": 1},
    "gnmt": {"layers": 6},  # residual connections begin with the third layer
    "transformer": {"layers": 2},
    "bert": {"layers": 2},
}


def tiny(name: str, **arguments: Any) -> tuple[LightningModule, BatchSpec]:
    """A model and what its batches look like."""
    model = build(name, **{"vocabulary": 61, "dim": 12, **_TINY[name], **arguments})
    return model, batch_spec(name, vocabulary=61, batch=3, length=5, negatives=9)


def quiet(model: Any) -> Any:
    """Lets steps run without a Trainer."""
    model.log = lambda *_, **__: None
    return model


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def tiny_emulated(name: str, **arguments: Any) -> LightningModule:
    """A model whose blocks are emulated, in no time."""
    model: Any = tiny(name, **arguments)[0]
    set_compute(model, "emulated", spread(model, 0.0))
    return model


def fit(
    name: str, strategy: Any, world_size: int, steps: int, **arguments: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """Trains a tiny model in fp64 on this rank's batches.

    Returns:
        Its weights and losses.
    """
    losses = Losses()
    spec = tiny(name)[1]
    data = StepBatches(spec, Zipf(words_of(spec), 1.0), int(os.environ.get("LOCAL_RANK", 0)), steps)
    make = tiny_emulated if arguments.pop("emulated", False) else lambda *a, **k: tiny(*a, **k)[0]
    model, _ = train(lambda: make(name, **arguments), list(data), strategy, world_size, callbacks=[losses])
    return {k: v.detach().clone() for k, v in model.state_dict().items()}, losses.losses


def fit_both(name: str, world_size: int, steps: int, **arguments: Any) -> list[tuple[dict[str, Tensor], list[float]]]:
    """Runs in a worker: trains under ``embrace`` with every table sharded, then under ``ddp``."""
    return [fit(name, strategy, world_size, steps, **arguments) for strategy in (EmbRaceStrategy(tables=["*"]), "ddp")]
