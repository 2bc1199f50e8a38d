"""Combinations that would train wrongly today, refused before training with what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_embrace.checkpoint.atomic import local_path
from lightning_embrace.checkpoint.io import plain_ios
from lightning_embrace.namespaces import Namespace
from lightning_embrace.tables.find import TableSpec
from lightning_embrace.tables.modules import is_sharded
from lightning_embrace.tables.parked import is_parked


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


def check_folders(
    checkpoint_io: Any, paths: Sequence[Any], namespace: Namespace, strategy: str = "EmbRaceStrategy"
) -> None:
    """Refuses sharded checkpoints where no folder can be written.

    Args:
        checkpoint_io: The strategy's.
        paths: Where checkpoints go, as far as it is known.
        namespace: Of Lightning.
        strategy: The name of its class.

    Raises:
        MisconfigurationException: A plugin is to write them, or they do not go to a local file system.
    """
    error = namespace.get_fabric("utilities.exceptions.MisconfigurationException")
    if type(checkpoint_io) not in plain_ios(namespace):
        raise error(
            f"{strategy}(state_dict_type='sharded') and the plugin {type(checkpoint_io).__name__}: a sharded"
            " checkpoint is written by torch.distributed.checkpoint, not by a CheckpointIO. Leave the plugin out, or"
            " set state_dict_type='full'."
        )
    for path in paths:
        if path is not None and local_path(path) is None:
            raise error(
                f"{strategy}(state_dict_type='sharded') writes folders to a file system that all ranks see, and"
                f" {str(path)!r} is not on one. Give ModelCheckpoint(dirpath=...) a path, or set"
                " state_dict_type='full'."
            )


def check_callbacks_anywhere(callbacks: Sequence[Any], namespace: Namespace) -> None:
    """Refuses callbacks that cannot run in several processes, whatever the model.

    Raises:
        MisconfigurationException: There is such a callback.
    """
    finder = namespace.get("callbacks.BatchSizeFinder")
    if any(isinstance(callback, finder) for callback in callbacks):
        raise namespace.get_fabric("utilities.exceptions.MisconfigurationException")(
            "BatchSizeFinder (Tuner.scale_batch_size) tries batches out in one process, and Lightning refuses it under"
            " every distributed strategy. Find the size with Trainer(devices=1, strategy='auto'), give it to the"
            " loader, and train with strategy='embrace' without the finder."
        )


def check_callbacks(callbacks: Sequence[Any], specs: Sequence[TableSpec], namespace: Namespace) -> None:
    """Refuses callbacks that would judge a table by the columns of one rank.

    Raises:
        MisconfigurationException: There is such a callback, and a sharded table.
    """
    sharded = {id(module): s.name for s in specs if s.place == "sharded" for module in s.lookups()}
    pruning = namespace.get("callbacks.ModelPruning")
    for callback in callbacks:
        if isinstance(callback, pruning):
            names = [sharded[id(m)] for m, _ in callback._parameters_to_prune if id(m) in sharded]
            if names:
                raise namespace.get_fabric("utilities.exceptions.MisconfigurationException")(
                    f"{type(callback).__name__} would prune {', '.join(names)}, of which each rank holds some columns."
                    " Give it parameters_to_prune=[(module, 'weight'), ...] without these tables, or keep them whole:"
                    f" EmbRaceStrategy(tables={['*', *(f'!{name}' for name in names)]})."
                )
