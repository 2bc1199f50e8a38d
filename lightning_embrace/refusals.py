"""Combinations that would train wrongly today, refused before training with what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_embrace.namespaces import Namespace
from lightning_embrace.tables.find import TableSpec
from lightning_embrace.tables.modules import is_sharded
from lightning_embrace.tables.parked import is_parked

#: Lightning's callbacks that copy the whole model before training and average or exchange all its parameters
_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging")


def check_model(model: nn.Module) -> None:
    """Refuses a model that an interrupted fit has left sharded, and one whose tables have no memory.

    Raises:
        ValueError: It has, or they have none.
    """
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and weight is not None and weight.is_meta:
            raise ValueError(
                f"Table {name!r} is on the meta device. Build it in `configure_model`, without `torch.device('meta')`:"
                " there each rank makes and initialises its own columns only."
            )
        if is_sharded(module) and not is_parked(module):
            raise ValueError(
                f"Table {name!r} is still sharded: an earlier fit of this model ended with an exception and nothing was"
                " gathered after it. Build the model anew and load its last checkpoint."
            )


def check_trainer(trainer: Any, precision_plugin: Any, namespace: Namespace) -> None:
    """Refuses Trainer settings whose results would differ from plain training.

    Raises:
        MisconfigurationException: Such a setting was found.
    """
    error = namespace.get_fabric("utilities.exceptions.MisconfigurationException")
    scaler = getattr(precision_plugin, "scaler", None)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise error(
            f"{type(precision_plugin).__name__}(scaler=...) is a {type(scaler).__name__}, of which the ranks could not"
            " agree on an overflow. Give a torch.amp.GradScaler, or use precision='bf16-mixed'."
        )


def check_callbacks(callbacks: Sequence[Any], specs: Sequence[TableSpec], namespace: Namespace) -> None:
    """Refuses callbacks that pair the parameters of a whole copy of the model with sharded ones.

    Raises:
        MisconfigurationException: There is such a callback, and a sharded table.
    """
    sharded = [s.name for s in specs if s.place == "sharded"]
    module = namespace.get("callbacks")
    averaging = tuple(getattr(module, name) for name in _AVERAGING if hasattr(module, name))
    for callback in callbacks:
        if sharded and isinstance(callback, averaging):
            raise namespace.get_fabric("utilities.exceptions.MisconfigurationException")(
                f"{type(callback).__name__} averages a whole copy of the model with its parameters, but each rank holds"
                f" only some columns of {', '.join(sharded)}. Keep the tables whole with EmbRaceStrategy(tables=[]),"
                " use strategy='ddp', or leave the callback out and average the checkpoints afterwards."
            )
