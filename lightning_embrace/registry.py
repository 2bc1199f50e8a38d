"""Makes the strategies known to Lightning by name."""

from __future__ import annotations

import warnings
from importlib import import_module

from lightning_utilities.core import rank_zero

from lightning_embrace.namespaces import NAMESPACES

_MODULES = {
    "lightning.pytorch": "lightning_embrace.strategy",
    "pytorch_lightning": "lightning_embrace.pytorch_lightning",
}
_HYDRA_MODULES = {
    "lightning.pytorch": "lightning_embrace.hydra.strategy",
    "pytorch_lightning": "lightning_embrace.pytorch_lightning",
}
_FABRIC_MODULES = {
    "lightning.pytorch": "lightning_embrace.fabric",
    "pytorch_lightning": "lightning_embrace.lightning_fabric",
}


def register() -> None:
    """Registers the strategies in every installed namespace of Lightning, and its Fabric. Doing it twice is harmless.

    Importing a namespace is the only way to its registry, and costs 0.1 s where the other one is there. Each one that
    is imported takes Lightning's rank-zero messages over: they are given back to the one that had them.
    """
    # the one that the program has imported goes first
    namespaces = sorted((n for n in NAMESPACES if n.installed), key=lambda n: not n.imported)
    keeper = None
    for namespace in namespaces:
        try:
            registry = namespace.get("strategies.StrategyRegistry")
        except Exception as error:  # an old release beside a new torch or numpy
            if keeper is None:
                raise
            warnings.warn(
                f"{namespace.name} is installed but cannot be imported: {error!r}. Its Trainer does not know"
                " lightning_embrace's strategies; that of the other namespace does.",
                stacklevel=2,
            )
            continue
        keeper = keeper or (rank_zero.log, rank_zero.rank_zero_deprecation_category)
        import_module(_MODULES[namespace.name]).EmbRaceStrategy.register_strategies(registry)
        import_module(_HYDRA_MODULES[namespace.name]).HydraStrategy.register_strategies(registry)
        fabrics = import_module(_FABRIC_MODULES[namespace.name]).EmbRaceStrategy
        fabrics.register_strategies(namespace.get_fabric("strategies.STRATEGY_REGISTRY"))
    if keeper is not None:
        rank_zero.log, rank_zero.rank_zero_deprecation_category = keeper
