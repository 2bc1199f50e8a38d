"""What would train wrongly, and is refused before training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_embrace.namespaces import Namespace
from lightning_embrace.tables.modules import ShardedEmbedding, ShardedEmbeddingBag

#: callbacks that read or change all weights past their modules
_CALLBACKS = ("StochasticWeightAveraging", "WeightAveraging", "ModelPruning")


def check_model(model: nn.Module, namespace: Namespace) -> None:
    """Refuses a model that cannot be spilled.

    Raises:
        MisconfigurationException: It is compiled, or its tables are sharded by EmbRaceStrategy.
    """
    error = _error(namespace)
    for name, module in model.named_modules():
        if isinstance(module, (ShardedEmbedding, ShardedEmbeddingBag)):
            raise error(
                f"HydraStrategy: {name!r} is sharded by EmbRaceStrategy, and one Trainer cannot do both. Build the"
                " model anew and take one: strategy='embrace' for large embeddings on several devices, strategy='hydra'"
                " for a model that does not fit one."
            )
        if _is_compiled(module):
            raise error(
                f"HydraStrategy: {name!r} is compiled, and compiled code would not see that parameters come"
                " and go. Leave torch.compile away."
            )
    if getattr(model, "_compiler_ctx", None) is not None:
        raise error(
            "HydraStrategy: the LightningModule is compiled, and a compiled step would not see that parameters come and"
            " go. Pass the module itself, without torch.compile."
        )


def _is_compiled(module: nn.Module) -> bool:
    own = (type(module).forward, *(v for v in vars(module).values() if callable(v)))
    inside = any(hasattr(f, "_torchdynamo_orig_callable") and not hasattr(f, "_torchdynamo_disable") for f in own)
    return inside or module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def check_trainer(trainer: Any, namespace: Namespace) -> None:
    """Refuses what is for several processes.

    Raises:
        MisconfigurationException: There are several, or batch norm is to be that of several.
    """
    connector = trainer._accelerator_connector
    if connector._layer_sync is not None:
        raise _error(namespace)(
            "HydraStrategy and Trainer(sync_batchnorm=True): on one device batch norm has the whole batch's statistics"
            " as it is. Leave it away."
        )
    environment = connector.cluster_environment
    elastic = namespace.get_fabric("plugins.environments.TorchElasticEnvironment")
    if isinstance(environment, elastic) and environment.world_size() > 1:
        raise _error(namespace)(
            f"HydraStrategy trains in one process, and torchrun has started {environment.world_size()} processes: each"
            " would train the whole model and write the same files. Start the program by itself; HydraFleet trains"
            " several models on several devices."
        )


def check_callbacks(callbacks: Sequence[Any], namespace: Namespace) -> None:
    """Refuses callbacks that would average or prune NaN.

    Raises:
        MisconfigurationException: There is one.
    """
    for name in _CALLBACKS:
        try:
            kind = namespace.get(f"callbacks.{name}")
        except AttributeError:  # older than the callback
            continue
        for callback in callbacks:
            if isinstance(callback, kind):
                raise _error(namespace)(
                    f"HydraStrategy: {type(callback).__name__} works on all weights at once, and they are never in one"
                    " place while a model is spilled. Train without it."
                )


def check_optimizers(optimizers: Sequence[Optimizer], namespace: Namespace) -> Optimizer:
    """Refuses several optimizers.

    Returns:
        The one.

    Raises:
        MisconfigurationException: There are more.
    """
    if len(optimizers) != 1:
        names = ", ".join(type(o).__name__ for o in optimizers)
        raise _error(namespace)(
            f"HydraStrategy steps one optimizer, and configure_optimizers returned {len(optimizers)} ({names}). Return"
            " one with several parameter groups."
        )
    return optimizers[0]


def _error(namespace: Namespace) -> type[Exception]:
    error: type[Exception] = namespace.get("utilities.exceptions.MisconfigurationException")
    return error
