"""How a strategy ends when something fails: the other ranks are told at once, and nothing is waited for."""

from __future__ import annotations

from lightning_embrace.batches import BatchesMixin
from lightning_embrace.callbacks import CallbacksMixin
from lightning_embrace.precision import PrecisionMixin
from lightning_embrace.reporting import ReportingMixin
from lightning_embrace.tracing import TracingMixin


class FailingMixin(ReportingMixin, BatchesMixin, CallbacksMixin, PrecisionMixin, TracingMixin):
    """What a strategy of the Trainer lets go of."""

    def _let_go(self) -> None:
        """What remains after a failure: no collective, no waiting for others."""
        self._let_loaders_go()
        self._give_precision_back()
        self._give_callbacks_back()
        super()._let_go()
        self._write_part_of_trace()
