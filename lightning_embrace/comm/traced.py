"""A communicator that records the exchanges of another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_embrace.comm.base import Communicator, Handle
from lightning_embrace.comm.traffic import Traffic, all_to_all_bytes, broadcast_bytes, ring_bytes
from lightning_embrace.monitor.span import Lane
from lightning_embrace.monitor.timeline import Exchange, Timeline


class TracedHandle:
    """Records the end of an exchange and the waiting for it; everything else is the handle's own.

    An exchange ends when its handle says so, see ``when_done`` of
    :class:`~lightning_embrace.comm.torch_backend.TorchHandle`, at the latest when it has been waited for. It starts
    when its handle says so (``when_started``), or at once.
    """

    def __init__(self, handle: Handle, exchange: Exchange) -> None:
        self._handle = handle
        self._exchange = exchange
        for event, note in (("when_started", exchange.started), ("when_done", exchange.done)):
            tell = getattr(handle, event, None)
            if tell is not None:
                tell(note)

    def wait(self) -> Tensor:
        """Blocks until done; see :class:`~lightning_embrace.comm.base.Handle`."""
        with self._exchange.waiting():
            return self._handle.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class TracedCommunicator:
    """Passes everything on to another communicator and records it. It changes no result, error or name.

    Args:
        inner: Carries the exchanges.
        timeline: Gets the spans.
    """

    def __init__(self, inner: Communicator, timeline: Timeline) -> None:
        self.inner = inner
        self.timeline = timeline
        self.rank: int = inner.rank
        self.world_size: int = inner.world_size
        self.device: torch.device = inner.device

    @property
    def traffic(self) -> Traffic:
        """The inner communicator's counters."""
        return self.inner.traffic

    @traffic.setter
    def traffic(self, traffic: Traffic) -> None:
        self.inner.traffic = traffic

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet: while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def at_step(self, step: int) -> None:
        """Notes the step, for spans and errors."""
        self.timeline.at_step(step)
        self.inner.at_step(step)

    def give_way(self, seconds: float, rate: float = 0.0) -> None:
        """See :class:`~lightning_embrace.comm.base.Communicator`."""
        self.inner.give_way(seconds, rate)

    def fail(self, error: BaseException) -> None:
        """See :class:`~lightning_embrace.comm.base.Communicator`."""
        self.inner.fail(error)

    def gather(self, header_H: Tensor, what: str) -> Handle:
        """See :class:`~lightning_embrace.comm.base.Communicator`."""
        size = _size(header_H) * (self.world_size - 1)
        exchange = self.timeline.queued(what, "sparse group", "header", size, received=size)
        return self._traced(lambda: self.inner.gather(header_H, what), exchange)

    def all_to_all(
        self,
        send: Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        kind: str,
        what: str,
        low_priority: bool = False,
        urgent: bool = True,
    ) -> Handle:
        """See :class:`~lightning_embrace.comm.base.Communicator`."""
        sent, received = all_to_all_bytes(send_splits, receive_splits, self.rank, send.element_size())
        return self._traced(
            lambda: self.inner.all_to_all(send, send_splits, receive_splits, kind, what, low_priority, urgent),
            self.timeline.queued(what, _lane(low_priority), kind, sent, received=received),
        )

    def all_reduce(self, flat: Tensor, kind: str, what: str, low_priority: bool = False) -> Handle:
        """See :class:`~lightning_embrace.comm.base.Communicator`."""
        size = ring_bytes(_size(flat), self.world_size)
        return self._traced(
            lambda: self.inner.all_reduce(flat, kind, what, low_priority),
            self.timeline.queued(what, _lane(low_priority), kind, size, received=size),
        )

    def broadcast(self, flat: Tensor, kind: str, what: str) -> Handle:
        """See :class:`~lightning_embrace.comm.base.Communicator`."""
        sent, received = broadcast_bytes(_size(flat), self.rank, self.world_size)
        return self._traced(
            lambda: self.inner.broadcast(flat, kind, what),
            self.timeline.queued(what, _lane(False), kind, sent, received=received),
        )

    def _traced(self, issue: Callable[[], Handle], exchange: Exchange) -> Handle:
        try:
            handle = issue()
        except BaseException as error:
            exchange.failed(error)
            raise
        return TracedHandle(handle, exchange)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _lane(low_priority: bool) -> Lane:
    return "dense group" if low_priority else "sparse group"
