"""Copies beside computing: on CUDA a stream of their own, on the CPU a thread alone is enough."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Lane:
    """Where copies run that were asked for in order; on the CPU they are done when they return."""

    def own(self, memory: Tensor) -> None:
        """Copies will use memory that was allocated for computing."""

    def mark(self) -> torch.cuda.Event | None:
        """The moment up to which computing has been asked for; what comes after may read what a copy brings."""
        return None

    def run(self, job: Callable[[], object], after: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Asks for copies, to be done when computing has come to a mark.

        Returns:
            When they are done.
        """
        job()
        return None

    def meet(self, done: torch.cuda.Event | None) -> None:
        """Lets computing go on only when copies are done; the caller goes on at once."""

    def finish(self) -> None:
        """Waits until all copies are done."""


class CudaLane(Lane):
    """A stream beside that on which computing runs.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def own(self, memory: Tensor) -> None:
        """See :class:`Lane`."""
        memory.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """See :class:`Lane`."""
        return _event(torch.cuda.current_stream(self._device))

    def run(self, job: Callable[[], object], after: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """See :class:`Lane`."""
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            job()
            return _event(self._stream)

    def meet(self, done: torch.cuda.Event | None) -> None:
        """See :class:`Lane`."""
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)

    def finish(self) -> None:
        """See :class:`Lane`."""
        self._stream.synchronize()


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def lane_for(device: torch.device) -> Lane:
    """The one that a device needs."""
    return CudaLane(device) if device.type == "cuda" else Lane()
