"""The callback that logs what moves between the device and the tiers, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.pytorch import Callback

from lightning_embrace.namespaces import LIGHTNING, Namespace

_MB = 1e6


class SpillMonitorMixin:
    """The callback without its base class, which differs between the two namespaces of Lightning."""

    namespace: ClassVar[Namespace]

    def __init__(self, prog_bar: bool = False) -> None:
        super().__init__()
        self.prog_bar = prog_bar
        self._before: Mapping[str, int] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Looks for the strategy.

        Raises:
            MisconfigurationException: Another strategy trains.
        """
        if stage == "fit" and not hasattr(trainer.strategy, "moved_bytes"):
            raise self.namespace.get("utilities.exceptions.MisconfigurationException")(
                f"SpillMonitor logs what HydraStrategy moves, but {type(trainer.strategy).__name__} trains. Write"
                " Trainer(strategy='hydra'), or leave the callback out."
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """From here on it counts."""
        self._before = trainer.strategy.moved_bytes()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Logs what the batch has moved; what is still on its way belongs to no batch."""
        found = figures(self._before, trainer.strategy.moved_bytes())
        pl_module.log_dict(found, prog_bar=self.prog_bar, on_step=True, on_epoch=False)


class SpillMonitor(SpillMonitorMixin, Callback):
    """Logs what HydraStrategy moves for each batch, in 10⁶ bytes.

    - ``hydra/host_read_mb``, ``hydra/host_written_mb``: between the device and host memory
    - ``hydra/disk_read_mb``, ``hydra/disk_written_mb``: between the device and the disk, where there is a disk tier

    Args:
        prog_bar: Show them in the progress bar, too.

    Raises:
        MisconfigurationException: When training begins under another strategy.
    """

    namespace = LIGHTNING


def figures(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, float]:
    """What is logged, by name."""
    return {f"hydra/{kind.replace(' ', '_')}_mb": (count - before.get(kind, 0)) / _MB for kind, count in after.items()}
