"""Makes the strategies known to Lightning by name."""

from __future__ import annotations

from importlib import import_module

from lightning_utilities.core import rank_zero

from lightning_embrace.namespaces import LIGHTNING, PYTORCH_LIGHTNING


def register() -> None:
    """Registers the strategies in every installed namespace of Lightning. Doing it twice is harmless."""
    # whichever namespace is imported last would take Lightning's rank-zero messages over
    log = rank_zero.log
    for namespace, module in (
        (LIGHTNING, "lightning_embrace.strategy"),
        (PYTORCH_LIGHTNING, "lightning_embrace.pytorch_lightning"),
    ):
        if namespace.installed:
            strategy = import_module(module).EmbRaceStrategy
            strategy.register_strategies(namespace.get("strategies.StrategyRegistry"))
    rank_zero.log = log
