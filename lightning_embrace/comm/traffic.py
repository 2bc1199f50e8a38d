"""Counts the payload that one rank puts on the wire, by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


class Traffic:
    """Bytes that this rank sent and received, counted where the collectives are issued.

    Only payload to *other* ranks counts. An AllReduce of B bytes on N ranks counts as 2·(N−1)/N·B both ways, which is
    what a ring puts on the wire; an AlltoAll, a gather or a point-to-point message counts what it carries.

    Attributes:
        sent: Bytes sent since the last :meth:`reset`, by kind: ``"header"``, ``"ids"``, ``"rows"``, ``"grads"``
            (sharded tables), ``"replicated"`` (tables kept whole), ``"dense"``, ``"buffers"``, ``"setup"``,
            ``"state"`` (gathering for checkpoints) and ``"served"`` (look-ups outside training steps).
        received: The same for received bytes.
        calls: Number of operations issued, by kind.
        steps: Optimizer steps since the last :meth:`reset`.
    """

    #: kinds that belong to no training step
    OUTSIDE_STEPS = frozenset({"setup", "state", "served"})

    def __init__(self) -> None:
        self.sent: dict[str, int] = defaultdict(int)
        self.received: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)
        self.steps = 0

    def add(self, kind: str, sent: int, received: int) -> None:
        """Counts one operation of ``kind``."""
        self.sent[kind] += sent
        self.received[kind] += received
        self.calls[kind] += 1

    def total_sent(self) -> int:
        """Bytes sent for training steps, all kinds together."""
        return sum(v for k, v in self.sent.items() if k not in self.OUTSIDE_STEPS)

    def per_step(self) -> dict[str, float]:
        """Mean bytes sent per optimizer step, by kind; empty before the first step."""
        if self.steps == 0:
            return {}
        return {k: v / self.steps for k, v in self.sent.items() if k not in self.OUTSIDE_STEPS}

    def reset(self) -> None:
        """Starts counting anew."""
        self.__init__()  # type: ignore[misc]


def ring_bytes(payload: int, world_size: int) -> int:
    """Bytes one rank sends in a ring AllReduce of ``payload`` bytes: 2·(N−1)/N of it."""
    return 2 * (world_size - 1) * payload // world_size


def all_to_all_bytes(
    send_splits: Sequence[int], receive_splits: Sequence[int], rank: int, itemsize: int
) -> tuple[int, int]:
    """Bytes that ``rank`` sends to others and receives from others in an AlltoAll of such elements."""
    return (sum(send_splits) - send_splits[rank]) * itemsize, (sum(receive_splits) - receive_splits[rank]) * itemsize


def broadcast_bytes(payload: int, rank: int, world_size: int) -> tuple[int, int]:
    """Bytes that ``rank`` sends and receives in a broadcast of ``payload`` bytes from rank 0."""
    return (payload * (world_size - 1), 0) if rank == 0 else (0, payload)
