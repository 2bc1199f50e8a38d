"""Names in both namespaces' Fabric."""

from __future__ import annotations

from typing import Any

import pytest

import lightning_embrace.fabric
import lightning_embrace.lightning_fabric
from lightning_embrace.namespaces import LIGHTNING, PYTORCH_LIGHTNING, Namespace, other

NAMES = {"embrace": "popen", "embrace_spawn": "spawn", "embrace_fork": "fork", "embrace_notebook": "fork"}
STRATEGIES: dict[Namespace, Any] = {
    LIGHTNING: lightning_embrace.fabric.EmbRaceStrategy,
    PYTORCH_LIGHTNING: lightning_embrace.lightning_fabric.EmbRaceStrategy,
}
BOTH = pytest.mark.parametrize("namespace", list(STRATEGIES), ids=lambda n: n.fabric)


@BOTH
def test_names(namespace: Namespace) -> None:
    """Each starts processes its own way, with the namespace's own class and launchers."""
    fabric = namespace.get_fabric("fabric.Fabric")
    for name, start_method in NAMES.items():
        strategy = fabric(strategy=name, accelerator="cpu", devices=2).strategy
        assert type(strategy) is STRATEGIES[namespace]
        assert strategy.config.start_method == start_method
        assert isinstance(strategy.launcher, namespace.get_fabric("strategies.launchers.launcher._Launcher"))


@BOTH
def test_a_strategy_of_another_kind(namespace: Namespace) -> None:
    """Fabric does not know the Trainer's, nor the other namespace's: the error must say which import to change."""
    fabric = namespace.get_fabric("fabric.Fabric")
    strategy = STRATEGIES[other(namespace)]()
    with pytest.raises(ValueError, match="invalid strategy") as raised:
        fabric(strategy=strategy, accelerator="cpu")
    module = STRATEGIES[namespace].__module__
    assert f"for {namespace.fabric}: from {module} import EmbRaceStrategy" in str(raised.value)


def test_arguments_are_checked() -> None:
    """Before anything is started."""
    with pytest.raises(ValueError, match=r"EmbRaceStrategy\(schedule='best'\)"):
        lightning_embrace.fabric.EmbRaceStrategy(schedule="best")  # type: ignore[arg-type]
