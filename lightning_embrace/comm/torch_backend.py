"""Carries the exchanges with torch.distributed (gloo or NCCL)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_embrace.comm.base import Handle
from lightning_embrace.comm.breaking import break_group
from lightning_embrace.comm.control import Control, RankFailedError
from lightning_embrace.comm.counting import CountingCommunicator, look_until
from lightning_embrace.comm.ordered import OrderedAllToAll
from lightning_embrace.comm.traffic import all_to_all_bytes, broadcast_bytes, ring_bytes
from lightning_embrace.monitor.timeline import shown

# how long one wait may last before the control channel is asked whether another rank has failed
_SLICE = timedelta(seconds=0.5)
# a broken connection is seen before the reason for it has travelled
_REASON_SECONDS = 3.0


class ExchangeError(RuntimeError):
    """An exchange failed and no rank said why."""


class TorchHandle:
    """Waits for a torch.distributed work item in slices, so that a failed peer is noticed while waiting."""

    def __init__(
        self,
        work: Any,
        result: Tensor,
        control: Control,
        what: str,
        on_stream: bool = False,
        to_cpu: bool = False,
    ) -> None:
        self._work = work
        self._to_cpu = to_cpu
        self._result = result
        self._control = control
        self._what = what
        self._on_stream = on_stream

    def is_done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return bool(self._work.is_completed())

    @property
    def tells(self) -> bool:
        """Whether :meth:`when_done` calls back. NCCL's work is complete for its future as soon as it is enqueued."""
        return not self._on_stream

    def wait(self) -> Tensor:
        """Blocks until done; see :class:`~lightning_embrace.comm.base.Handle`."""
        with shown(f"wait {self._what}"):
            wait_for(self._work, self._control, self._what, on_stream=self._on_stream)
        return self._result.cpu() if self._to_cpu else self._result

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls back at the end of the exchange, good or bad, from any thread, and before :meth:`wait` returns.

        Nobody is called unless it :attr:`tells`.
        """
        if self.tells:
            self._work.get_future().add_done_callback(lambda _: callback())


def wait_for(work: Any, control: Control, what: str, *, on_stream: bool = False) -> None:
    """Waits for ``work``, raising the failure of another rank instead of waiting for ever.

    Args:
        work: A torch.distributed work item.
        control: The channel on which ranks report failures.
        what: The exchange's name, for the error.
        on_stream: The work is NCCL's: its own ``wait`` only orders the streams and returns at once, and whatever reads
            the result would hang with a rank that never comes. So its end is awaited here.

    Raises:
        RankFailedError: Another rank failed.
        ExchangeError: The exchange failed and no rank said why within some seconds.
    """
    try:
        if on_stream:
            look_until(work.is_completed, control.check)
            control.check()  # the end of what was aborted because of a failure
            work.wait()
        else:
            while not _done_within_slice(work):
                control.check()
    except RankFailedError:
        raise
    except RuntimeError as error:
        raise_cause(error, control, what)


def _done_within_slice(work: Any) -> bool:
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():  # the slice has ended, nothing else
            return False
        work.wait()  # what ended at the same moment, well or badly
    return True


def raise_cause(error: RuntimeError, control: Control, what: str) -> NoReturn:
    """Raises what an exchange broke from.

    Args:
        error: What torch.distributed raised.
        control: The channel on which ranks report failures.
        what: The exchange's name.

    Raises:
        RankFailedError: Another rank failed.
        ExchangeError: No rank said why within some seconds.
    """
    control.check()
    if control.wait_for_failure(_REASON_SECONDS) is not None:
        control.check()
    step = "" if control.step is None else f" (at step {control.step})"
    raise ExchangeError(
        f"The exchange {what!r}{step} failed and no rank reported why: {error}. Look for the first error in the other"
        " ranks' output. If there is none, a rank hangs, or takes longer than `timeout` for its part."
    ) from error


class TorchCommunicator(CountingCommunicator):
    """torch.distributed on two process groups of our own, so that nobody else's collectives come between.

    Args:
        rank: This process' rank.
        world_size: Number of ranks.
        device: Where exchanged tensors live.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: How long one exchange may take.
        control: The channel on which ranks report failures.
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device, backend: str, timeout: timedelta, control: Control
    ) -> None:
        super().__init__(rank, world_size, device, control)
        self._on_stream = backend == "nccl"
        if self._on_stream:
            # two communicators at once: their kernels start in the order in which this process launched them
            os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        # urgent exchanges (rows and their gradients) must not queue behind large AllReduces
        self._sparse = dist.new_group(timeout=timeout, backend=backend, pg_options=_group_options(backend, timeout))
        self._dense = dist.new_group(timeout=timeout, backend=backend)
        self._all_to_all = {group: self._all_to_all_on(group) for group in (self._sparse, self._dense)}

    def gather(self, header_H: Tensor, what: str) -> Handle:
        """See :class:`~lightning_embrace.comm.base.Communicator`."""
        header_H = header_H.to(self.device)
        gathered_NH = header_H.new_empty(self.world_size, header_H.numel())
        # from every rank to every other one: gloo's AllGather passes headers on from rank to rank, and at each of the
        # N - 1 hops they would wait behind the large messages that are on that link
        work = self._issue(
            what,
            dist.all_to_all_single,
            gathered_NH.view(-1),
            header_H.repeat(self.world_size),
            group=self._sparse,
            async_op=True,
        )
        sent = header_H.numel() * header_H.element_size() * (self.world_size - 1)
        self._count("header", sent, sent)
        return self._handle(work, gathered_NH, what, to_cpu=True)

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
        assert send.dim() == 1 and send.is_contiguous() and send.numel() == sum(send_splits)
        received = send.new_empty(sum(receive_splits))
        start = self._all_to_all[self._dense if low_priority else self._sparse]
        work = self._issue(what, start, received, send, list(receive_splits), list(send_splits))
        sent, came = all_to_all_bytes(send_splits, receive_splits, self.rank, send.element_size())
        handle = self._handle(work, received, what)
        if urgent and not low_priority:
            self._urgent.add(work.is_completed, max(sent, came), handle.when_done if handle.tells else None)
        self._count(kind, sent, came)
        return handle

    def all_reduce(self, flat: Tensor, kind: str, what: str, low_priority: bool = False) -> Handle:
        """See :class:`~lightning_embrace.comm.base.Communicator`."""
        group = self._dense if low_priority else self._sparse
        work = self._issue(what, dist.all_reduce, flat, group=group, async_op=True)
        sent = ring_bytes(flat.numel() * flat.element_size(), self.world_size)
        self._count(kind, sent, sent)
        return self._handle(work, flat, what)

    def broadcast(self, flat: Tensor, kind: str, what: str) -> Handle:
        """See :class:`~lightning_embrace.comm.base.Communicator`."""
        work = self._issue(what, dist.broadcast, flat, src=0, group=self._sparse, async_op=True)
        self._count(kind, *broadcast_bytes(flat.numel() * flat.element_size(), self.rank, self.world_size))
        return self._handle(work, flat, what)

    def close(self) -> None:
        """Gives the process groups back. Call it when no exchange is under way on any rank."""
        if dist.is_initialized():
            dist.destroy_process_group(self._sparse)
            dist.destroy_process_group(self._dense)

    def abandon(self) -> None:
        """Ends after a failure: what is under way raises, for this process could not end before it has."""
        break_group(self._sparse)
        break_group(self._dense)

    def _all_to_all_on(self, group: Any) -> Callable[..., Any]:
        if self.device.type == "cpu" and dist.get_backend(group) == "gloo":
            return OrderedAllToAll(group, self.rank, self.world_size).start
        return partial(dist.all_to_all_single, group=group, async_op=True)

    def _handle(self, work: Any, result: Tensor, what: str, to_cpu: bool = False) -> TorchHandle:
        return TorchHandle(work, result, self.control, what, self._on_stream, to_cpu)

    def _issue(self, what: str, operation: Any, *args: Any, **kwargs: Any) -> Any:
        self.control.check()
        self.control.at(what)
        try:
            return operation(*args, **kwargs)
        except RuntimeError as error:
            raise_cause(error, self.control, what)


def _group_options(backend: str, timeout: timedelta) -> Any:
    """High-priority CUDA streams for the urgent group; gloo has none."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options
