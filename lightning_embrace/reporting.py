"""How a rank that fails tells the others at once, and lets go of them without waiting for anybody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_embrace.comm.connect import Connection
from lightning_embrace.comm.serve import RowService
from lightning_embrace.mixin import Base
from lightning_embrace.session import Session


class ReportingMixin(Base):
    """What a strategy, of the Trainer or of Fabric, holds of the other ranks."""

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
        if self._session is not None:
            self._session.release()
        if self._connection is not None:
            self._connection.abandon()
        self._session = self._connection = self._service = None
