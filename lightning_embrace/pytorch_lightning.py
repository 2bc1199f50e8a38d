"""Strategy and callback for ``pytorch_lightning``, Lightning's older name: ``lightning_embrace.pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning import Callback
from pytorch_lightning.strategies import ParallelStrategy, SingleDeviceStrategy

from lightning_embrace.hydra.monitoring import SpillMonitorMixin
from lightning_embrace.hydra.strategy import HydraMixin
from lightning_embrace.monitoring import CommunicationMonitorMixin
from lightning_embrace.namespaces import PYTORCH_LIGHTNING
from lightning_embrace.strategy import EmbRaceMixin


class EmbRaceStrategy(EmbRaceMixin, ParallelStrategy):  # type: ignore[misc]
    """The strategy whose arguments :class:`lightning_embrace.EmbRaceStrategy` describes."""

    namespace = PYTORCH_LIGHTNING


class HydraStrategy(HydraMixin, SingleDeviceStrategy):  # type: ignore[misc]
    """The strategy whose arguments :class:`lightning_embrace.HydraStrategy` describes."""

    namespace = PYTORCH_LIGHTNING


class CommunicationMonitor(CommunicationMonitorMixin, Callback):
    """The callback that :class:`lightning_embrace.CommunicationMonitor` describes."""

    namespace = PYTORCH_LIGHTNING


class SpillMonitor(SpillMonitorMixin, Callback):
    """The callback that :class:`lightning_embrace.SpillMonitor` describes."""

    namespace = PYTORCH_LIGHTNING
