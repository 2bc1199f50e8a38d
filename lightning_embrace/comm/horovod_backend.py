"""Carries the exchanges with Horovod.

Horovod negotiates by name: an operation starts when every rank has issued that name, whatever the order. So there are
no groups: what has low priority waits its turn in the queue, chunk by chunk, and an urgent exchange waits for the
chunks on the wire at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_embrace.comm.base import Handle
from lightning_embrace.comm.control import Control
from lightning_embrace.comm.counting import CountingCommunicator, look_until
from lightning_embrace.comm.horovod_install import load_horovod
from lightning_embrace.comm.horovod_start import HorovodProcess
from lightning_embrace.comm.torch_backend import ExchangeError, raise_cause
from lightning_embrace.comm.traffic import all_to_all_bytes, broadcast_bytes, ring_bytes
from lightning_embrace.monitor.timeline import shown

#: what carries an element whose bits are only moved: Horovod knows fewer dtypes than torch
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HorovodHandle:
    """Waits for an operation by looking, so that a failed peer is noticed and nobody waits for ever.

    Args:
        comm: Whose operation it is.
        number: Horovod's handle.
        what: The exchange's name.
        finish: Makes the result of what Horovod gives back.
    """

    def __init__(self, comm: HorovodCommunicator, number: int, what: str, finish: Callable[[Any], Tensor]) -> None:
        self._comm = comm
        self._number = number
        self._what = what
        self._finish = finish
        self._until = time.monotonic() + comm.timeout.total_seconds()
        self._taking = threading.Lock()
        self._result: Tensor | None = None
        self._error: RuntimeError | None = None

    def is_done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        with self._taking:
            return self._has_ended()

    def wait(self) -> Tensor:
        """Blocks until done; see :class:`~lightning_embrace.comm.base.Handle`."""
        with shown(f"wait {self._what}"):
            look_until(self.is_done, self._watch)
            return self._take()

    def _watch(self) -> None:
        self._comm.control.check()
        if time.monotonic() > self._until:
            self._comm.time_out(self._what)

    def _has_ended(self) -> bool:
        if self._result is not None or self._error is not None:
            return True
        return bool(self._comm.horovod.poll(self._number))

    def _take(self) -> Tensor:
        with self._taking:
            if self._result is None and self._error is None:
                try:
                    self._result = self._finish(self._comm.horovod.synchronize(self._number))
                except RuntimeError as error:
                    self._error = error
        if self._error is not None:
            self._comm.broke(self._error, self._what)
        assert self._result is not None
        return self._result


class HorovodCommunicator(CountingCommunicator):
    """Horovod for the exchanges of training, started here. Collective.

    Args:
        rank: This process' rank.
        world_size: Number of ranks.
        device: Where exchanged tensors live.
        timeout: How long one exchange may take.
        control: The channel on which ranks report failures.
        main_address: Where rank 0 can be reached.
        timeline: Where rank 0 writes Horovod's own timeline, if anywhere.

    Raises:
        HorovodUnavailableError: Horovod cannot be used here.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta,
        control: Control,
        main_address: str,
        timeline: str | None = None,
    ) -> None:
        super().__init__(rank, world_size, device, control)
        self.timeout = timeout
        self.horovod: Any = load_horovod()
        self._process = HorovodProcess(self.horovod, control, main_address, timeout, timeline)
        # the urgent ones and the others are issued by two threads, each in an order that is the same on all ranks
        self._issued = {False: 0, True: 0}
        #: no operation may begin any more; and Horovod has been ended here
        self._broken = self._ended = False

    def gather(self, header_H: Tensor, what: str) -> Handle:
        """See :class:`~lightning_embrace.comm.base.Communicator`."""
        header_H = header_H.cpu()
        sent = header_H.numel() * header_H.element_size() * (self.world_size - 1)
        self._count("header", sent, sent)
        return self._issue(
            what,
            lambda name: self.horovod.allgather_async(header_H, name=name),
            lambda gathered: gathered.view(self.world_size, -1),
        )

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
        check_splits(send, send_splits, receive_splits, self.world_size, what)
        bits = send.detach().view(_SAME_SIZE[send.element_size()])
        splits = torch.tensor(send_splits, dtype=torch.int32)
        sent, came = all_to_all_bytes(send_splits, receive_splits, self.rank, send.element_size())
        self._count(kind, sent, came)

        def finish(received: tuple[Tensor, Tensor]) -> Tensor:
            came = received[1].tolist()
            if came != list(receive_splits):
                raise ExchangeError(f"expected {list(receive_splits)} elements by rank, got {came}")
            return received[0].view(send.dtype)

        handle = self._issue(
            what, lambda name: self.horovod.alltoall_async(bits, splits, name=name), finish, low_priority
        )
        if urgent and not low_priority:
            self._urgent.add(lambda: self._broken or handle.is_done(), max(sent, came))
        return handle

    def all_reduce(self, flat: Tensor, kind: str, what: str, low_priority: bool = False) -> Handle:
        """See :class:`~lightning_embrace.comm.base.Communicator`."""
        # Horovod adds no bf16; sums in fp32 are better ones
        summed = flat.detach().float() if flat.dtype == torch.bfloat16 else flat.detach()
        sent = ring_bytes(summed.numel() * summed.element_size(), self.world_size)
        self._count(kind, sent, sent)

        def finish(_: Tensor) -> Tensor:
            if summed.dtype != flat.dtype:
                flat.copy_(summed)
            return flat

        return self._issue(
            what,
            lambda name: self.horovod.allreduce_async_(summed, name=name, op=self.horovod.Sum),
            finish,
            low_priority,
        )

    def broadcast(self, flat: Tensor, kind: str, what: str) -> Handle:
        """See :class:`~lightning_embrace.comm.base.Communicator`."""
        bits = flat.detach().view(_SAME_SIZE[flat.element_size()])
        self._count(kind, *broadcast_bytes(flat.numel() * flat.element_size(), self.rank, self.world_size))
        return self._issue(
            what, lambda name: self.horovod.broadcast_async_(bits, root_rank=0, name=name), lambda _: flat
        )

    def close(self) -> None:
        """Ends Horovod. Call it when no exchange is under way on any rank, and after a barrier."""
        if not self._ended:
            self._broken = self._ended = True
            self._process.shut_down()

    def abandon(self) -> None:
        """Ends after a failure: no operation begins any more, and what is under way raises."""
        if not self._ended:
            self._broken = self._ended = True
            self._process.sever()

    def time_out(self, what: str) -> None:
        """An exchange has not ended within the timeout.

        Raises:
            RankFailedError: Another rank failed.
            ExchangeError: None has said so.
        """
        self.broke(RuntimeError(f"it has not ended within {self.timeout.total_seconds():g} s, the `timeout`"), what)

    def broke(self, error: RuntimeError, what: str) -> None:
        """An exchange has failed: none may follow, Horovod would sometimes hang.

        Raises:
            RankFailedError: Another rank failed.
            ExchangeError: None has said so.
        """
        self._broken = True
        raise_cause(error, self.control, what)

    def _issue(
        self,
        what: str,
        operation: Callable[[str], int],
        finish: Callable[[Any], Tensor],
        low_priority: bool = False,
    ) -> HorovodHandle:
        self.control.check()
        self.control.at(what)
        if self._broken:
            # as long as whoever saw it break waits for the news of the cause: this thread must not report itself first
            self.broke(RuntimeError("it was not begun, because one before it failed on this rank"), what)
        number = self._issued[low_priority]
        self._issued[low_priority] += 1
        try:
            handle = operation(f"embrace {'later' if low_priority else 'now'} {number} {what}")
        except RuntimeError as error:
            raise_cause(error, self.control, what)
        return HorovodHandle(self, handle, what, finish)


def check_splits(
    send: Tensor, send_splits: Sequence[int], receive_splits: Sequence[int], world_size: int, what: str
) -> None:
    """Checks an AlltoAll before Horovod sees it: it would drop what is not in the splits, or hang the other ranks.

    Raises:
        ValueError: The splits do not fit the tensor or the world.
    """
    for name, splits in (("send_splits", send_splits), ("receive_splits", receive_splits)):
        if len(splits) != world_size or min(splits) < 0 or max(splits) >= 1 << 31:
            raise ValueError(
                f"The exchange {what!r}: {name} must be {world_size} numbers from 0 to 2^31 - 1, got {list(splits)}."
            )
    if send.dim() != 1 or not send.is_contiguous() or send.numel() != sum(send_splits):
        raise ValueError(
            f"The exchange {what!r}: send_splits add up to {sum(send_splits)}; give as many elements, in one dimension,"
            f" contiguous. Got the shape {tuple(send.shape)} with strides {send.stride()}."
        )
