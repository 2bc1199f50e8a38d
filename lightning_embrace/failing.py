"""How a strategy ends when something fails: the other ranks are told at once, and nothing is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_embrace.batches import BatchesMixin
from lightning_embrace.callbacks import CallbacksMixin
from lightning_embrace.comm.connect import Connection
from lightning_embrace.comm.serve import RowService
from lightning_embrace.precision import PrecisionMixin
from lightning_embrace.session import Session
from lightning_embrace.tracing import TracingMixin


class FailingMixin(BatchesMixin, CallbacksMixin, PrecisionMixin, TracingMixin):
    """What a strategy holds of the other ranks, and how it lets go of it."""

    _connection: Connection | None
    _session: Session | None
    _service: RowService | None
    _failed: bool
    _stopping: bool

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Tells the other ranks of an exception at once, before callbacks and teardown take their time."""
        try:
            yield
        except StopIteration:
            raise
        except BaseException as error:
            self.on_exception(error)
            raise

    def on_exception(self, exception: BaseException) -> None:
        """From here on no collective starts, except after a SIGTERM, at which all ranks stop alike."""
        if self._stopping and isinstance(exception, SystemExit):
            return
        self._failed = True
        if self._connection is not None:
            self._connection.fail(exception)
        if self._service is not None:
            self._service.abandon()
        if self._session is not None and self.world_size > 1:
            self._session.release()

    def give_up(self, exception: BaseException) -> None:
        """Ends a process whose exception Lightning does not see."""
        self.on_exception(exception)
        self._let_go()

    def _let_go(self) -> None:
        """What remains after a failure: no collective, no waiting for others."""
        self._let_loaders_go()
        self._give_precision_back()
        self._give_callbacks_back()
        if self._session is not None:
            self._session.release()
        if self._connection is not None:
            self._connection.abandon()
        self._write_part_of_trace()
        self._session = self._connection = self._service = None
