"""What a strategy records of its training, see `monitor`."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

import torch.distributed as dist

from lightning_embrace.comm.base import Communicator
from lightning_embrace.comm.traced import TracedCommunicator
from lightning_embrace.comm.traffic import Traffic
from lightning_embrace.config import EmbRaceConfig
from lightning_embrace.mixin import Base
from lightning_embrace.monitor.files import remove_part, write_part, write_together
from lightning_embrace.monitor.span import Recording
from lightning_embrace.monitor.timeline import Profiled, Recorder, Timeline
from lightning_embrace.session import Session
from lightning_embrace.steps import StepReader

#: enough spans for the steps that are read, where no trace is written
_FEW_SPANS = 20_000


class TracingMixin(Base):
    """Spans of compute, and the file that all ranks' spans end in."""

    config: EmbRaceConfig
    traffic: Traffic
    _session: Session | None
    _timeline: Timeline | None
    _recorder: Recorder
    #: the span of what follows backward
    _stepping: ExitStack
    #: somebody wants to know how long training waits
    _measured = False

    def measure_waiting(self) -> None:
        """Call before training: waiting is recorded in the fit that follows, with a trace or without."""
        self._measured = True

    def read_steps(self) -> StepReader:
        """Call when training begins.

        Returns:
            Reads, at every step's end, what this rank has sent and waited for in it.
        """
        assert self._session is not None
        return StepReader(self.traffic, self._session, self._timeline)

    def _traced(self, communicator: Communicator) -> Communicator:
        """Begins to record, if that is wanted."""
        measured, self._measured = self._measured, False
        self._timeline, self._recorder = None, Profiled()
        if self.config.trace is not None:
            remove_part(self.config.trace, self.global_rank)
            timeline = Timeline(self.global_rank, self.world_size)
        elif measured:
            timeline = Timeline(self.global_rank, self.world_size, _FEW_SPANS)
        else:
            return communicator
        self._timeline = self._recorder = timeline
        return TracedCommunicator(communicator, self._timeline)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning steps here, and runs the closure with the training step and backward inside."""
        try:
            return super().optimizer_step(*args, **kwargs)
        finally:
            self._stepping.close()

    def _step_follows(self) -> None:
        self._stepping.close()
        self._stepping.enter_context(self._recorder.span("optimizer step", "compute"))

    def _write_trace(self) -> None:
        """At an orderly end: one file of all ranks. Collective."""
        if self._timeline is not None and self.config.trace is not None:
            self._stepping.close()
            write_together(self.config.trace, self._timeline, _gather)
        self._timeline = None

    def _write_part_of_trace(self) -> None:
        """After a failure: this rank's part, beside the others'."""
        if self._timeline is not None and self.config.trace is not None:
            self._stepping.close()
            with suppress(OSError):
                write_part(self.config.trace, self._timeline)
        self._timeline = None


def _gather(mine: Recording) -> list[Recording] | None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    gathered: list[Recording] | None = [mine] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered)
    return gathered
