"""An AlltoAll over gloo whose large messages leave one after the other, so that no rank's link lies idle."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: a message of this size or more leaves in its turn
LARGE_BYTES = 64 << 10
# messages that leave at the same time: two keep the link busy while the next one is handed over
_LEAVING = 2


class OrderedAllToAll:
    """AlltoAlls on one gloo group.

    gloo's own sends each message when its receiver's note has arrived. In which order that is, chance decides: some
    links get everything at the end, when the others are idle already, and with eight ranks an exchange takes a third
    longer than its bytes. Here every rank sends to the next one first, then to the one after that, and so on: each
    receives from one after the other. What is large is known to the sender and the receiver of a message, and so no
    agreement is needed; what is small travels together in gloo's own AlltoAll.

    Args:
        group: A gloo group of all ranks.
        rank: This rank.
        world_size: N.
    """

    def __init__(self, group: Any, rank: int, world_size: int) -> None:
        self._group = group
        self._rank = rank
        self._world_size = world_size
        self._started = 0

    def start(self, received: Tensor, sent: Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]) -> Any:
        """Starts one exchange; all ranks start the same ones in the same order.

        Args:
            received: [sum(receive_splits)], filled when the work is done.
            sent: [sum(send_splits)], of the same dtype.
            receive_splits: Elements from each rank.
            send_splits: Elements to each rank.

        Returns:
            A work item: ``is_completed``, ``wait`` and ``get_future`` are torch.distributed's.
        """
        tag, self._started = self._started, (self._started + 1) % (1 << 30)
        outgoing, incoming = sent.split(list(send_splits)), received.split(list(receive_splits))
        to = [r for r in self._around(1) if outgoing[r].nbytes >= LARGE_BYTES]
        of = [r for r in self._around(-1) if incoming[r].nbytes >= LARGE_BYTES]
        if not to and not of:
            return self._collective(received, sent, list(receive_splits), list(send_splits))
        coming = [dist.irecv(incoming[r], r, self._group, tag) for r in of]  # their notes leave before any message
        leaving = (dist.isend(outgoing[r], r, self._group, tag) for r in to)
        small = self._send_small(outgoing, incoming, set(to), set(of))
        return _Running(leaving, coming, *small)

    def _around(self, direction: int) -> Iterator[int]:
        return ((self._rank + direction * k) % self._world_size for k in range(1, self._world_size))

    def _send_small(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], to: set[int], of: set[int]
    ) -> tuple[Any, Tensor, list[Tensor]]:
        """Starts what is left; the work item, its result, and the pieces that this is for."""
        out = [piece[:0] if r in to else piece for r, piece in enumerate(outgoing)]
        into = [piece[:0] if r in of else piece for r, piece in enumerate(incoming)]
        splits = [piece.numel() for piece in into]
        received = torch.cat(into)
        work = self._collective(received, torch.cat(out), splits, [piece.numel() for piece in out])
        return work, received, into

    def _collective(self, received: Tensor, sent: Tensor, receive_splits: list[int], send_splits: list[int]) -> Any:
        return dist.all_to_all_single(received, sent, receive_splits, send_splits, group=self._group, async_op=True)


class _Running:
    """A work item that a thread of its own leads to its end."""

    def __init__(
        self, leaving: Iterable[Any], coming: Iterable[Any], small: Any, received: Tensor, pieces: Sequence[Tensor]
    ) -> None:
        self._end: Future[None] = Future()
        parts = (leaving, coming, small, received, pieces)
        threading.Thread(target=self._run, args=parts, name="embrace-all-to-all", daemon=True).start()

    def is_completed(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._end.done()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Blocks until it has ended.

        Raises:
            RuntimeError: It failed, or has not ended within ``timeout``.
        """
        try:
            self._end.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError("still under way") from error

    def get_future(self) -> Future[None]:
        """Is done when it has ended."""
        return self._end

    def _run(
        self, leaving: Iterable[Any], coming: Iterable[Any], small: Any, received: Tensor, pieces: Sequence[Tensor]
    ) -> None:
        try:
            under_way: deque[Any] = deque()
            for work in leaving:  # begins the next one
                under_way.append(work)
                if len(under_way) >= _LEAVING:
                    under_way.popleft().wait()
            for work in (*under_way, *coming, small):
                work.wait()
            torch._foreach_copy_(list(pieces), list(received.split([piece.numel() for piece in pieces])))
        except BaseException as error:  # raised by whoever waits
            self._end.set_exception(error)
        else:
            self._end.set_result(None)
