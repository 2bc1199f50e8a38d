"""What a strategy says of its plan, once, after the first synchronised step."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_embrace.config import EmbRaceConfig
from lightning_embrace.mixin import Base
from lightning_embrace.optim.split import may_defer
from lightning_embrace.plan import print_plan
from lightning_embrace.schedule.order import Schedule
from lightning_embrace.session import STEP_HOOKS, Session


class AnnouncingMixin(Base):
    """Prints the plan."""

    config: EmbRaceConfig
    _session: Session | None
    _plan_printed: bool
    #: why the next batch's ids cannot be known
    _blind_because: str | None
    #: why updates are applied at once
    _barrier_because: str | None

    def _announce(self) -> None:
        """Call after every synchronised backward pass."""
        if self._plan_printed or self._session is None:
            return
        self._plan_printed = True
        if not self.is_global_zero:
            return
        assert self.lightning_module is not None
        wire = self.config.wire_dtype
        print_plan(
            self._session.specs,
            self._session.usage(),
            self.world_size,
            wire.itemsize if wire is not None else None,
            self.lightning_module.trainer.progress_bar_callback,
            self._session.why_whole(),
            list(self._notes()) if self.world_size > 1 else [],
        )

    def _notes(self) -> Iterator[str]:
        schedule = Schedule.of(self.config.schedule)
        yield f"schedule {self.config.schedule!r}"
        if not schedule.ahead:
            return
        if self._blind_because is not None:
            yield f"the next batch is not known: {self._blind_because}"
        reasons = [may_defer(optimizer, STEP_HOOKS) for optimizer in self.optimizers] if schedule.horizontal else []
        reason = self._barrier_because or next(filter(None, reasons), None)
        if reason is not None:
            what = "all updates are" if self._barrier_because else "dense updates are"
            yield f"{what} applied at the optimizer's step: {reason}"
