"""Starts the ranks' processes, with Lightning's own launchers."""

from __future__ import annotations

import os
from typing import Any

import torch

from lightning_embrace.namespaces import Namespace


def make_launcher(strategy: Any, namespace: Namespace, start_method: str) -> Any:
    """The launcher for a start method.

    Args:
        strategy: The strategy to launch, with a cluster environment.
        namespace: The Lightning it belongs to.
        start_method: ``"popen"`` or a multiprocessing start method.

    Returns:
        A Lightning launcher.
    """
    if start_method == "popen":
        launcher = namespace.get("strategies.launchers._SubprocessScriptLauncher")
        return launcher(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
    launcher = namespace.get("strategies.launchers._MultiProcessingLauncher")
    if start_method == "fork":
        launcher = _one_thread_after_fork(launcher)
    return launcher(strategy, start_method=start_method)


def _one_thread_after_fork(launcher: Any) -> Any:
    """A child forked after the parent has used OpenMP hangs in its first parallel region: give it one thread."""

    class ForkLauncher(launcher):  # type: ignore[misc]
        def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
            if "OMP_NUM_THREADS" not in os.environ:
                os.environ["OMP_NUM_THREADS"] = "1"  # Lightning leaves the number alone where it is set
                torch.set_num_threads(1)
            super()._wrapping_function(*args, **kwargs)

    return ForkLauncher
