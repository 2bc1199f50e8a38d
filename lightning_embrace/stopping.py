"""Signals that stop a run or have it requeued: all ranks take them together, between two steps."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_embrace.mixin import Base
from lightning_embrace.namespaces import Namespace
from lightning_embrace.session import Session
from lightning_embrace.signals import REQUEUE, STOP, Signals, at_batch_end, requeue_signal


class StoppingMixin(Base):
    """Stands between Lightning's signal handlers and the signals."""

    namespace: ClassVar[Namespace]
    _session: Session | None
    _stopping: bool
    _signals: Signals
    #: a callback of ours, with which all ranks save for a job that is requeued
    _requeueing: Any = None

    def on_train_start(self) -> None:
        """Lightning has set its signal handlers by now."""
        super().on_train_start()
        signal = requeue_signal(self.cluster_environment, self.namespace)
        self._signals.take_over(signal)
        if signal is not None and self._session is not None and self.lightning_module is not None:
            self._requeueing = at_batch_end(self.namespace, self._requeue)
            # the last one: what the others save in this hook is in its checkpoint
            _callbacks(self.lightning_module).append(self._requeueing)

    def _stop_if_told(self, session: Session) -> None:
        """Call after backward: Lightning ends the run after this step."""
        if session.all_heard & STOP and not self._stopping:
            self._stopping = True
            self._signals.stop()

    def _requeue(self) -> None:
        """A step is over: saves if any rank has been told to."""
        session = self._session
        if session is not None and session.all_heard & REQUEUE:
            session.all_heard &= ~REQUEUE
            self._signals.requeue()

    def _give_callbacks_back(self) -> None:
        super()._give_callbacks_back()  # type: ignore[misc]
        module, own = self.lightning_module, self._requeueing
        if own is not None and module is not None and own in _callbacks(module):
            _callbacks(module).remove(own)
        self._requeueing = None


def _callbacks(module: Any) -> list[Any]:
    callbacks: list[Any] = module.trainer.callbacks
    return callbacks
