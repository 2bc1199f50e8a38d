"""What one step's exchanges cost, and how much of it was hidden behind compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_embrace.monitor.intervals import Interval, common, length, union
from lightning_embrace.monitor.span import Span

_SECOND = 1e9


@dataclass(frozen=True)
class Summary:
    """One rank's step. Times are in seconds.

    Attributes:
        waiting: How long training stood still, by what it waited for: ``"sparse group"``, ``"dense group"`` or
            ``"other"``. Where two threads wait at a time, it counts once for each.
        exposed: How long it stood still for anything.
        sent: Bytes sent to other ranks, by lane.
        in_flight: How long at least one exchange of the step was on the wire, in this step or a later one.
        hidden: The part of it in which compute ran.
    """

    waiting: dict[str, float]
    exposed: float
    sent: dict[str, int]
    in_flight: float
    hidden: float

    @property
    def overlap(self) -> float:
        """The hidden share of the time in flight, 0 to 1; 1 where nothing was in flight."""
        return self.hidden / self.in_flight if self.in_flight else 1.0

    def metrics(self) -> dict[str, float]:
        """All figures by name, for a logger."""
        return {
            **{f"seconds waiting for {lane}": seconds for lane, seconds in self.waiting.items()},
            "seconds exposed": self.exposed,
            **{f"bytes sent on {lane}": float(count) for lane, count in self.sent.items()},
            "seconds in flight": self.in_flight,
            "overlap": self.overlap,
        }


def summarise(spans: Iterable[Span], step: int) -> Summary:
    """Sums up one rank's step.

    Compute is what lies in the compute lane and not in the waiting lane: look-ups wait inside the forward pass.

    Args:
        spans: The rank's spans, with the steps around this one: its delayed exchanges run behind their compute.
        step: The step.

    Returns:
        Its figures.
    """
    waits: dict[str, list[Interval]] = defaultdict(list)
    compute: list[Interval] = []
    stalls: list[Interval] = []
    flights: list[Interval] = []
    sent: dict[str, int] = defaultdict(int)
    for span in spans:
        interval = (span.begin, span.end)
        if span.lane == "compute":
            compute.append(interval)
        elif span.lane == "waiting":
            stalls.append(interval)
            if span.step == step:
                waits[str(span.args.get("group", "other"))].append(interval)
        elif span.step == step:
            flights.append(interval)
            sent[span.lane] += span.nbytes or 0
    in_flight = length(flights)
    computing = common(flights, compute)
    hidden = length(computing) - length(common(computing, stalls))
    return Summary(
        waiting={lane: length(times) / _SECOND for lane, times in waits.items()},
        exposed=length(union(interval for times in waits.values() for interval in times)) / _SECOND,
        sent=dict(sent),
        in_flight=in_flight / _SECOND,
        hidden=hidden / _SECOND,
    )
