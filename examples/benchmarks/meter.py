"""Measures one rank's steps: wall time, CPU time, bytes on its link, peak memory, loss."""

from __future__ import annotations

import resource
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from examples.benchmarks.counters import LinkCounters


@dataclass(frozen=True)
class Step:
    """One measured step of one rank.

    Attributes:
        seconds: From the start of this step to the start of the next.
        cpu: CPU seconds of the process, all its threads.
        sent: Bytes that left on the rank's link.
        received: Bytes that arrived there.
        loss: This rank's loss.
        counts: What the peer counted in this step.
    """

    seconds: float
    cpu: float
    sent: int
    received: int
    loss: float
    counts: dict[str, float] = field(default_factory=dict)


class Meter:
    """Called at every step boundary.

    Args:
        warmup: Steps that are not kept.
    """

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self._link = LinkCounters.of_this_rank()
        self._marks: list[tuple[float, float, int, int]] = []
        self._losses: list[float] = []
        self._counts: dict[int, dict[str, float]] = {}

    def boundary(self) -> None:
        """Call before the first step and after every step."""
        link = self._link.read() if self._link is not None else (0, 0)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self._marks.append((time.perf_counter(), usage.ru_utime + usage.ru_stime, *link))

    def loss(self, value: float) -> None:
        """Call once in every step."""
        self._losses.append(value)

    def count(self, **values: float) -> None:
        """Call before the boundary that ends a step, with what is to be kept with it."""
        self._counts[len(self._marks) - 1] = values

    def result(self) -> dict[str, Any]:
        """The measured steps, all losses and the peak memory in bytes, for JSON."""
        steps = [
            Step(*(b - a for a, b in zip(before, after)), loss, self._counts.get(k, {}))
            for k, (before, after, loss) in enumerate(zip(self._marks, self._marks[1:], self._losses))
        ]
        return {
            "steps": [asdict(s) for s in steps[self._warmup :]],
            "losses": self._losses,
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
