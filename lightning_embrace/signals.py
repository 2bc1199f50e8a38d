"""Signals, kept until all ranks can take them at the same point of the same step."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning_embrace.namespaces import Namespace

#: what a rank has heard, as bits: all ranks' together are what all of them take
STOP, REQUEUE = 1, 2


class Signals:
    """Stands before the handlers that Lightning has set, and calls them when told to.

    For SIGTERM that handler makes all ranks join a broadcast at once, wherever each of them is: between two collectives
    of which the others have begun one, or twice where a signal to the whole process group comes on top of the one that
    the parent passes on. Either never ends. For the signal with which SLURM announces that a job is to be requeued, it
    saves a checkpoint, likewise.
    """

    def __init__(self) -> None:
        #: bits of the signals that have arrived
        self.heard = 0
        self._handlers: dict[int, tuple[int, Any]] = {}

    def take_over(self, requeue: int | None = None) -> None:
        """Call it once Lightning has set its handlers; Lightning puts back what was there before them by itself.

        Args:
            requeue: The signal that requeues the job, if Lightning has a handler for it.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self.heard, self._handlers = 0, {}
        for number, bit in ((signal.SIGTERM, STOP), (requeue, REQUEUE)):
            handler = None if number is None else signal.getsignal(number)
            if number is not None and callable(handler):
                self._handlers[bit] = (number, handler)
                signal.signal(number, self._hear)

    def stop(self) -> None:
        """Calls Lightning's handler of SIGTERM, and those that were set before it, once. Collective."""
        self._deliver(*self._handlers.pop(STOP, (0, None)))

    def requeue(self) -> None:
        """Saves for a job that is requeued. Collective."""
        self.heard &= ~REQUEUE
        self._deliver(*self._handlers.get(REQUEUE, (0, None)))

    def _deliver(self, number: int, handler: Any) -> None:
        if handler is not None:
            handler(number, sys._getframe())

    def _hear(self, number: int, frame: FrameType | None) -> None:
        for bit, (mine, _) in self._handlers.items():
            if mine == number:
                self.heard |= bit


def requeue_signal(environment: Any, namespace: Namespace) -> int | None:
    """The signal for which Lightning has a handler that saves and requeues; None: it has none.

    Args:
        environment: The cluster environment.
        namespace: Of Lightning.
    """
    slurm = namespace.get_fabric("plugins.environments.SLURMEnvironment")
    if not isinstance(environment, slurm) or not environment.auto_requeue:
        return None
    handler = signal.getsignal(environment.requeue_signal)
    lightnings = namespace.get("trainer.connectors.signal_connector._HandlersCompose")
    return int(environment.requeue_signal) if isinstance(handler, lightnings) else None


def at_batch_end(namespace: Namespace, call: Callable[[], None]) -> Any:
    """A callback that calls ``call`` when a training batch is over.

    Args:
        namespace: Of Lightning.
        call: What is called.
    """
    base = namespace.get("callbacks.Callback")
    return type("AtBatchEnd", (base,), {"on_train_batch_end": lambda *_, **__: call()})()
