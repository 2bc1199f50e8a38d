"""``Fabric(strategy="embrace")``: sharded tables in a loop that the user wrote."""

from __future__ import annotations

from lightning.fabric.strategies.parallel import ParallelStrategy

from lightning_embrace.fabric.strategy import EmbRaceFabricMixin
from lightning_embrace.namespaces import LIGHTNING

__all__ = ["EmbRaceStrategy"]


class EmbRaceStrategy(EmbRaceFabricMixin, ParallelStrategy):  # type: ignore[misc]  # see `fabric.strategy`
    """The strategy for ``lightning.fabric``: trains as under ``ddp``, with fewer bytes on the wire.

    A forward pass of the module that ``fabric.setup()`` returned, with gradients, begins a step; ``fabric.backward()``
    synchronises; the optimizer ends it. Updates are applied in the optimizer's step: what a loop reads afterwards,
    nobody knows. Loaders from ``fabric.setup_dataloaders()`` hold one batch ahead, as far as that is of use.

    Args:
        tables: As in :class:`lightning_embrace.EmbRaceStrategy`.
        schedule: As there. ``"2d"`` and ``"horizontal"`` send dense gradients in the order of need, ``"2d"`` and
            ``"vertical"`` send rows of the next batch early; gradients come whole.
        lookahead: As there; ``function(batch)`` gets a tuple of batches where several loaders are trained on at once.
        wire_dtype: As there.
        chunk_bytes: As there.
        process_group_backend: As there.
        timeout: As there.
        start_method: As there.
        accelerator: As in Fabric's DDPStrategy.
        parallel_devices: As in Fabric's DDPStrategy.
        cluster_environment: As in Fabric's DDPStrategy.
        checkpoint_io: As in Fabric's DDPStrategy.
        precision: As in Fabric's DDPStrategy.

    Raises:
        ValueError: An argument has a value that is not allowed.
    """

    namespace = LIGHTNING
