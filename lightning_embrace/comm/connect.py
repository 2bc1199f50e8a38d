"""Connects the ranks: the control channel first, then the communicator on process groups of our own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_embrace.comm.base import Communicator, LocalCommunicator
from lightning_embrace.comm.breaking import break_group
from lightning_embrace.comm.control import Control, Hub
from lightning_embrace.comm.horovod_backend import HorovodCommunicator
from lightning_embrace.comm.torch_backend import ExchangeError, TorchCommunicator, raise_cause

# how long a rank that knows of another's failure may take to notice it by itself
_GRACE_SECONDS = 2.0


class Connection:
    """What one rank holds of the others, made on top of an initialised default process group. Collective.

    From here on every rank is watched. The communicator that trains comes with :meth:`open_groups`; a rank that fails
    between the two is named as well.

    Args:
        rank: This process' rank.
        world_size: Number of ranks.
        device: Where exchanged tensors live.
        backend: ``"gloo"``, ``"nccl"`` or ``"horovod"``.
        timeout: How long one exchange may take.
        main_address: Where rank 0 can be reached.
        timeline: With Horovod, where it writes its own timeline, if anywhere.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        backend: str,
        timeout: timedelta,
        main_address: str,
        timeline: str | None = None,
    ) -> None:
        self.control = Control(0, 1)
        self.communicator: Communicator = LocalCommunicator(device)
        self._carrier: TorchCommunicator | HorovodCommunicator | None = None
        self._rank, self._world_size = rank, world_size
        self._backend, self._timeout = backend, timeout
        self._main_address, self._timeline = main_address, timeline
        self._ended = threading.Event()
        #: the ranks have agreed on the checkpoint that they go on from, or on none
        self.agreed_on_start = False
        if world_size == 1:
            return
        hub = Hub(world_size, host=main_address) if rank == 0 else None
        meeting = [(hub.port, hub.token) if hub is not None else None]
        with self.naming("joining"):
            dist.broadcast_object_list(meeting, src=0)
        assert meeting[0] is not None
        port, token = meeting[0]
        self.control = Control(rank, world_size, main_address, port, token, hub)
        self.control.when_failed(self._free_the_stuck)
        self._barrier("joining")  # the hub watches only those who have joined

    def open_groups(self) -> None:
        """Makes the communicator. Collective."""
        if self._world_size > 1:
            # a new group has no connections yet, and would wait for a rank that has failed until the timeout
            self._barrier("setup")
            self.communicator = self._carrier = self._make_carrier(self.communicator.device)

    def _make_carrier(self, device: torch.device) -> TorchCommunicator | HorovodCommunicator:
        if self._backend != "horovod":
            return TorchCommunicator(self._rank, self._world_size, device, self._backend, self._timeout, self.control)
        with self.naming("start of Horovod"):
            return HorovodCommunicator(
                self._rank, self._world_size, device, self._timeout, self.control, self._main_address, self._timeline
            )

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Names the rank at fault when a collective of Lightning's, on the default group, breaks.

        Args:
            what: What to call the collective.
        """
        self._refuse_after_failure(what)
        self.control.at(what)
        try:
            yield
        except RuntimeError as error:
            raise_cause(error, self.control, what)

    def gather_words(self, words: list[int | str], what: str) -> list[list[Any]]:
        """Every rank's few words, see :mod:`lightning_embrace.comm.meeting`. Collective.

        Args:
            words: This rank's, as JSON has them.
            what: What the ranks do, for errors.

        Returns:
            The words by rank.

        Raises:
            RankFailedError: Another rank failed.
            RuntimeError: Another rank's process does not answer, or some ranks do something else.
        """
        self._refuse_after_failure(what)
        return self.control.gather(words, what, self._timeout.total_seconds())

    def fail(self, exception: BaseException) -> None:
        """Tells the others of an exception on this rank. From here on no exchange begins, and none is waited for."""
        if self._world_size == 1 or self._ended.is_set():
            return
        self._ended.set()
        if _comes_from_transport(exception):
            failure = self.control.wait_for_failure(_GRACE_SECONDS)  # the news of its cause
            if failure is not None and hasattr(exception, "add_note"):  # from Python 3.11 on
                exception.add_note(f"[lightning_embrace] {failure}")
        self.control.report(exception)
        self._break()

    def close(self) -> None:
        """Ends in good order. Call it when no exchange is under way on any rank."""
        self._ended.set()
        if self._carrier is not None:
            self._carrier.close()
        self.control.close()

    def abandon(self) -> None:
        """Ends after a failure: no collective, no waiting for others."""
        self._ended.set()
        self._break()
        self.control.close()

    def _refuse_after_failure(self, what: str) -> None:
        self.control.check()
        if self._ended.is_set():
            raise ExchangeError(f"The exchange {what!r} was not begun, because this rank has failed before.")

    def _barrier(self, what: str) -> None:
        with self.naming(what):
            devices = [self.communicator.device.index] if dist.get_backend() == "nccl" else None
            dist.barrier(device_ids=devices)

    def _break(self) -> None:
        if self._carrier is not None:
            self._carrier.abandon()

    def _free_the_stuck(self) -> None:
        """Another rank has failed: frees this one from a collective of Lightning's, where nothing else reaches it."""
        if not self._ended.wait(_GRACE_SECONDS):
            self._break()
            if dist.is_initialized():
                break_group(dist.group.WORLD)


def _comes_from_transport(exception: BaseException) -> bool:
    """Whether torch.distributed raised it."""
    trace = exception.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("torch.distributed")
