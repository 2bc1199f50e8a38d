"""Opens the session of a strategy, of the Trainer or of Fabric, and the service of its rows."""

from __future__ import annotations

from torch import nn

from lightning_embrace.comm.base import Communicator
from lightning_embrace.comm.connect import Connection
from lightning_embrace.comm.serve import RowService
from lightning_embrace.comm.traffic import Traffic
from lightning_embrace.config import EmbRaceConfig
from lightning_embrace.distributed import DistributedMixin
from lightning_embrace.monitor.timeline import Recorder
from lightning_embrace.schedule.order import Schedule
from lightning_embrace.session import Session
from lightning_embrace.tables.find import TableSpec


class OpeningMixin(DistributedMixin):
    """What shards a model's tables."""

    config: EmbRaceConfig
    traffic: Traffic
    _connection: Connection | None
    _session: Session | None
    _service: RowService | None
    _recorder: Recorder

    def _open(self, model: nn.Module, specs: list[TableSpec], communicator: Communicator) -> Session:
        """Shards the tables. Collective.

        Args:
            model: The model, the same on every rank.
            specs: Its tables.
            communicator: The connection's, or one that records what goes by.
        """
        assert self._connection is not None
        self._connection.communicator.traffic = self.traffic
        self._check_same_model(communicator, model)
        self._session = Session(
            model,
            specs,
            communicator,
            self.config.wire_dtype,
            Schedule.of(self.config.schedule),
            self.config.chunk_bytes,
            self._recorder,
        )
        if self.world_size > 1:
            self._service = RowService(
                self.global_rank,
                self.world_size,
                self._session.rows.reader(),
                self._connection.control,
                self.traffic,
                self.config.timeout,
            )
            self._session.rows.service = self._service
        return self._session
