"""The strategy for ``lightning_fabric``, the Fabric of ``pytorch_lightning``."""

from __future__ import annotations

from lightning_fabric.strategies.parallel import ParallelStrategy

from lightning_embrace.fabric.strategy import EmbRaceFabricMixin
from lightning_embrace.namespaces import PYTORCH_LIGHTNING


class EmbRaceStrategy(EmbRaceFabricMixin, ParallelStrategy):  # type: ignore[misc]
    """The strategy whose arguments :class:`lightning_embrace.fabric.EmbRaceStrategy` describes."""

    namespace = PYTORCH_LIGHTNING
