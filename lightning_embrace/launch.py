"""Starts the ranks' processes, with Lightning's own launchers."""

from __future__ import annotations

import functools
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from lightning_embrace.comm.control import RankFailedError
from lightning_embrace.namespaces import Namespace

# how long interrupted children have to end by themselves
_GRACE_SECONDS = 3.0
# exit code of a child that has left training early, on SIGTERM as a rule
_EARLY = 128 + signal.SIGTERM
_START_METHODS = {"embrace": "popen", "embrace_spawn": "spawn", "embrace_fork": "fork", "embrace_notebook": "fork"}


def register_by_start_method(strategy_registry: Any, strategy: type) -> None:
    """Adds a strategy under a name for each way of starting processes.

    Args:
        strategy_registry: The Trainer's, or Fabric's.
        strategy: The strategy's class.
    """
    for name, start_method in _START_METHODS.items():
        strategy_registry.register(
            name,
            strategy,
            description=f"Sparsity-aware hybrid communication, processes started by {start_method}",
            override=True,
            start_method=start_method,
        )


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
    return launcher_of_children(namespace)(strategy, start_method=start_method)


@functools.cache
def launcher_of_children(namespace: Namespace) -> Any:
    """Lightning's multiprocessing launcher of a namespace, with children that say why they fail and end on Ctrl-C."""
    base = namespace.get("strategies.launchers._MultiProcessingLauncher")
    return type("ChildrenLauncher", (_ChildrenMixin, base), {"make_class": staticmethod(launcher_of_children)})


class ChildMixin:
    """A launcher's children, of the Trainer or of Fabric, that say why they fail."""

    _strategy: Any
    _start_method: str
    #: makes the launcher's class, which has no name to be found by, of a namespace
    make_class: Callable[[Namespace], Any]

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        if self._start_method == "fork" and "OMP_NUM_THREADS" not in os.environ:
            # a child forked after the parent has used OpenMP hangs in its first parallel region
            os.environ["OMP_NUM_THREADS"] = "1"  # Lightning leaves the number alone where it is set
            torch.set_num_threads(1)
        try:
            super()._wrapping_function(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, RankFailedError):
                traceback.print_exc()  # the parent shows one child's only, which may be that of a consequence
            self._strategy.give_up(error)  # Lightning tells the parent's strategy alone
            if isinstance(error, SystemExit) and not error.code:
                raise SystemExit(_EARLY) from error  # with 0 the parent would wait for a result
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_launcher, (self.make_class, self._strategy.namespace), self.__getstate__()  # type: ignore[attr-defined]


class _ChildrenMixin(ChildMixin):
    procs: list[Any]

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Ends the children when the parent is interrupted: a notebook interrupts nobody but its kernel."""
        try:
            return super().launch(*args, **kwargs)  # type: ignore[misc]
        except KeyboardInterrupt:
            deadline = time.monotonic() + _GRACE_SECONDS
            for process in self.procs:  # in a terminal they were interrupted too, and may have something to say
                process.join(max(0.0, deadline - time.monotonic()))
            self.kill(signal.SIGKILL)  # type: ignore[attr-defined]
            raise


def _new_launcher(make_class: Callable[[Namespace], Any], namespace: Namespace) -> Any:
    """Unpickles a launcher in a child."""
    kind = make_class(namespace)
    return kind.__new__(kind)
