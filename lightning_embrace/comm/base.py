"""The small interface between what must be exchanged and what carries it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_embrace.comm.traffic import Traffic


class Handle(Protocol):
    """A pending exchange. :meth:`wait` is the only way to its result."""

    def wait(self) -> Tensor:
        """Blocks until the exchange is done.

        Returns:
            The received tensor.

        Raises:
            RankFailedError: Another rank failed; the message names the rank, step and exchange.
            ExchangeError: The exchange itself failed and no rank said why.
        """
        ...

    def is_done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once. Never decide by it what to exchange next."""
        ...


class Communicator(Protocol):
    """The collectives that training needs. All ranks issue the same ones in the same order.

    ``kind`` is the entry of :class:`~lightning_embrace.comm.traffic.Traffic` that counts the payload, ``what`` names
    the exchange in errors and profiles.
    """

    rank: int
    world_size: int
    device: torch.device
    traffic: Traffic

    def gather(self, header_H: Tensor, what: str) -> Handle:
        """All-gathers one int64 header of equal length per rank; the result is [N, H] on the CPU."""
        ...

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
        """Sends consecutive pieces of a 1-D tensor to the ranks; the result holds their pieces in rank order.

        The own piece travels too (locally) and is part of the result. With ``low_priority`` it takes its place among
        the AllReduces of that kind; they give way to it if it is ``urgent``.
        """
        ...

    def all_reduce(self, flat: Tensor, kind: str, what: str, low_priority: bool = False) -> Handle:
        """Sums a 1-D tensor over all ranks in place.

        What is urgent and what is not travel on process groups of their own: each keeps its own order.
        """
        ...

    def give_way(self, seconds: float, rate: float = 0.0) -> None:
        """Returns when no urgent AlltoAll is under way on this rank, at the latest after ``seconds`` and its time.

        Bounded, because an urgent exchange may wait for a rank that waits for what comes after this call. Of its time,
        half a second counts at most, and of an exchange below 64 KiB nothing.

        Args:
            seconds: Waited for longest, beside what the exchange takes.
            rate: Bytes a second, by which that is known; 0: it is not.
        """
        ...

    def fail(self, error: BaseException) -> None:
        """An exchange has failed in a thread that does not train: tells all ranks, and this one where it waits next.

        The training thread may be waiting for ranks that wait for that exchange.
        """
        ...

    def broadcast(self, flat: Tensor, kind: str, what: str) -> Handle:
        """Copies rank 0's 1-D tensor into everybody's, in place."""
        ...

    def at_step(self, step: int) -> None:
        """Notes the step, for errors."""
        ...


class Done:
    """A handle whose result is already there."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        """Returns the result."""
        return self._result

    def is_done(self) -> bool:
        """It is."""
        return True


class LocalCommunicator:
    """The world of one rank: everything is already where it belongs."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.rank = 0
        self.world_size = 1
        self.device = device or torch.device("cpu")
        self.traffic = Traffic()

    def gather(self, header_H: Tensor, what: str) -> Handle:
        """Returns the header as the only row."""
        return Done(header_H.unsqueeze(0))

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
        """Returns what was sent."""
        return Done(send)

    def all_reduce(self, flat: Tensor, kind: str, what: str, low_priority: bool = False) -> Handle:
        """Leaves the tensor as it is: a sum over one rank."""
        return Done(flat)

    def give_way(self, seconds: float, rate: float = 0.0) -> None:
        """Nothing is under way."""

    def fail(self, error: BaseException) -> None:
        """There is nobody to tell."""

    def broadcast(self, flat: Tensor, kind: str, what: str) -> Handle:
        """Leaves the tensor as it is."""
        return Done(flat)

    def at_step(self, step: int) -> None:
        """Nobody else can fail."""
