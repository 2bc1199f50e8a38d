"""Starts the ranks' processes, with Fabric's own launchers."""

from __future__ import annotations

import functools
from typing import Any

from lightning_embrace.launch import ChildMixin
from lightning_embrace.namespaces import Namespace


def make_launcher(strategy: Any, namespace: Namespace, start_method: str) -> Any:
    """The launcher for a start method.

    Args:
        strategy: The strategy to launch, with a cluster environment.
        namespace: The Lightning it belongs to.
        start_method: ``"popen"`` or a multiprocessing start method.

    Returns:
        A launcher of Fabric's.
    """
    if start_method == "popen":
        launcher = namespace.get_fabric("strategies.launchers.subprocess_script._SubprocessScriptLauncher")
        return launcher(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
    return launcher_of_children(namespace)(strategy, start_method=start_method)


@functools.cache
def launcher_of_children(namespace: Namespace) -> Any:
    """Fabric's multiprocessing launcher of a namespace, with children that say why they fail."""
    base = namespace.get_fabric("strategies.launchers.multiprocessing._MultiProcessingLauncher")
    return type("FabricChildrenLauncher", (ChildMixin, base), {"make_class": staticmethod(launcher_of_children)})
