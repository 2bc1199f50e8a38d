"""The callback that logs what communication costs, step by step."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning.pytorch import Callback

from lightning_embrace.namespaces import LIGHTNING, Namespace
from lightning_embrace.steps import StepCost, StepReader

_MB = 1e6
_MS = 1e3


class CommunicationMonitorMixin:
    """The callback without its base class, which differs between the two namespaces of Lightning."""

    namespace: ClassVar[Namespace]

    def __init__(self, prog_bar: bool = False) -> None:
        super().__init__()
        self.prog_bar = prog_bar
        self._reader: StepReader | None = None
        self._steps = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Asks the strategy to record waiting.

        Raises:
            MisconfigurationException: Another strategy trains.
        """
        if stage != "fit":
            return
        if not hasattr(trainer.strategy, "measure_waiting"):
            raise self.namespace.get_fabric("utilities.exceptions.MisconfigurationException")(
                f"CommunicationMonitor logs what EmbRaceStrategy counts, but {type(trainer.strategy).__name__} trains."
                " Write Trainer(strategy='embrace'), or leave the callback out."
            )
        trainer.strategy.measure_waiting()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """From here on it counts."""
        self._reader, self._steps = trainer.strategy.read_steps(), trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Logs the step, if the optimizer has stepped: while gradients accumulate it goes on."""
        if self._reader is None or trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        pl_module.log_dict(figures(self._reader.read()), prog_bar=self.prog_bar, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Lets go of the tables."""
        self._reader = None


class CommunicationMonitor(CommunicationMonitorMixin, Callback):
    """Logs what each step costs this rank; Lightning's loggers keep rank 0's.

    - ``embrace/sent_mb``: payload sent to other ranks, in 10⁶ bytes
    - ``embrace/exposed_ms``: how long training stood still for other ranks
    - ``embrace/unique_share``: different ids among all ids looked up; only these travel
    - ``embrace/prior_share``: gradient rows that were waited for, among all; the others travel behind the next step
    - ``embrace/early_share``: rows that came during the step before, among those that were known before their look-up

    A share of nothing is not logged: without look-ahead no row comes early.

    Args:
        prog_bar: Show them in the progress bar, too.

    Raises:
        MisconfigurationException: When training begins under another strategy.
    """

    namespace = LIGHTNING


def figures(cost: StepCost) -> dict[str, float]:
    """What is logged of a step, by name."""
    found = {
        "sent_mb": cost.sent_in_steps / _MB,
        "exposed_ms": None if cost.exposed is None else cost.exposed * _MS,
        "unique_share": cost.share("unique"),
        "prior_share": cost.share("prior"),
        "early_share": cost.share("early"),
    }
    return {f"embrace/{name}": value for name, value in found.items() if value is not None}
