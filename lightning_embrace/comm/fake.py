"""A communicator without processes, for tests: records what is issued and waited for, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_embrace.comm.base import Handle
from lightning_embrace.comm.traffic import Traffic, all_to_all_bytes, broadcast_bytes, ring_bytes

Operation = Literal["gather", "all_to_all", "all_reduce", "broadcast", "wait"]


class Event(NamedTuple):
    """One line of the record."""

    operation: Operation
    what: str
    elements: int


class _Recorded:
    """An exchange that takes place when it is waited for, so that a result read too early is a wrong one."""

    def __init__(self, events: list[Event], exchange: Callable[[], Tensor], what: str) -> None:
        self._events = events
        self._exchange = exchange
        self._what = what

    def wait(self) -> Tensor:
        """Returns the result."""
        result = self._exchange()
        self._events.append(Event("wait", self._what, result.numel()))
        return result

    def is_done(self) -> bool:
        """It takes place when it is waited for."""
        return False


class TwinCommunicator:
    """Answers as if every other rank were this one's twin and issued the same with the same values.

    Args:
        world_size: N, number of ranks to pretend.
        rank: This rank.

    Attributes:
        events: What was issued and waited for, in order.
    """

    def __init__(self, world_size: int = 2, rank: int = 0) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device("cpu")
        self.traffic = Traffic()
        self.events: list[Event] = []
        self.step = 0
        self.failure: BaseException | None = None

    def issued(self, *operations: Operation) -> list[str]:
        """Names of the exchanges issued, in order; of some operations, or of all."""
        return [e.what for e in self.events if e.operation != "wait" and (not operations or e.operation in operations)]

    def gather(self, header_H: Tensor, what: str) -> Handle:
        """Every rank has this header."""
        self.events.append(Event("gather", what, header_H.numel()))
        sent = header_H.numel() * header_H.element_size() * (self.world_size - 1)
        self.traffic.add("header", sent, sent)
        return _Recorded(self.events, lambda: header_H.repeat(self.world_size, 1), what)

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
        """Every rank sends here what this rank sends to itself."""
        assert send.numel() == sum(send_splits)
        own = send.split(list(send_splits))[self.rank]
        assert list(receive_splits) == [own.numel()] * self.world_size, "twins send equal pieces"
        self.events.append(Event("all_to_all", what, send.numel()))
        self.traffic.add(kind, *all_to_all_bytes(send_splits, receive_splits, self.rank, send.element_size()))
        return _Recorded(self.events, lambda: own.repeat(self.world_size), what)

    def all_reduce(self, flat: Tensor, kind: str, what: str, low_priority: bool = False) -> Handle:
        """The sum is N times this rank's tensor, in place."""
        self.events.append(Event("all_reduce", what, flat.numel()))
        sent = ring_bytes(flat.numel() * flat.element_size(), self.world_size)
        self.traffic.add(kind, sent, sent)
        return _Recorded(self.events, lambda: flat.mul_(self.world_size), what)

    def broadcast(self, flat: Tensor, kind: str, what: str) -> Handle:
        """Rank 0's tensor is this rank's."""
        self.events.append(Event("broadcast", what, flat.numel()))
        self.traffic.add(kind, *broadcast_bytes(flat.numel() * flat.element_size(), self.rank, self.world_size))
        return _Recorded(self.events, lambda: flat, what)

    def give_way(self, seconds: float, rate: float = 0.0) -> None:
        """Nothing is under way."""

    def fail(self, error: BaseException) -> None:
        """Notes the failure."""
        self.failure = error

    def at_step(self, step: int) -> None:
        """Notes the step."""
        self.step = step
