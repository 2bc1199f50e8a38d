"""How a strategy of Fabric ends: Fabric does not say when a loop is over, the process does."""

from __future__ import annotations

import sys
from multiprocessing.util import Finalize

from torch.optim import Optimizer

from lightning_embrace.fabric.steps import Steps
from lightning_embrace.reporting import ReportingMixin

# before loaders' workers are ended, and whatever else has no priority
_EARLY = 100


class EndingMixin(ReportingMixin):
    """Leaves the other ranks in good order, wherever the process ends."""

    _steps: Steps | None
    _optimizers: list[Optimizer]
    _leaving: Finalize | None = None

    def setup_environment(self) -> None:
        """Meets the other ranks; at the process' end they are told that this one has ended well."""
        super().setup_environment()
        # not `atexit`, which the children of multiprocessing do not run
        self._leaving = Finalize(None, self._leave, exitpriority=_EARLY)

    def teardown(self) -> None:
        """Puts whole tables and optimizer states back and leaves the other ranks. Collective; nobody has to call it."""
        try:
            if self._session is not None and not self._failed:
                with self._reporting():
                    self._session.unshard(self._optimizers)
                    self.barrier("teardown")
                    if self._service is not None:
                        self._service.stop()
            if self._connection is not None and not self._failed:
                self._connection.close()
                self._connection = None
        finally:
            self._let_go()
            super().teardown()

    def _leave(self) -> None:
        """The process ends."""
        error = getattr(sys, "last_value", None)  # what has ended a script
        if isinstance(error, BaseException):
            self.give_up(error)
            return
        if self._session is not None and not self._failed:
            self._session.drain()
        if self._service is not None:
            self._service.leave()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _let_go(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
        super()._let_go()
        self._steps = None
        self._optimizers = []
