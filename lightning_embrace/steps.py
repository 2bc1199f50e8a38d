"""What each step of a training costs one rank, for whoever logs or measures it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lightning_embrace.comm.traffic import Traffic
from lightning_embrace.monitor.summary import summarise
from lightning_embrace.monitor.timeline import Timeline
from lightning_embrace.session import Session

#: by share, the rows that count and the others, see :attr:`StepCost.rows`
_SHARES = {"unique": ("unique", "repeated"), "prior": ("prior", "delayed"), "early": ("early", "rest")}


@dataclass(frozen=True)
class StepCost:
    """What came to pass between two readings, mostly one step.

    Attributes:
        sent: Bytes sent to other ranks, by kind, see :class:`~lightning_embrace.comm.traffic.Traffic`.
        received: The same for received bytes.
        rows: ``"unique"`` and ``"repeated"``: ids that look-ups were given, look-up by look-up. Where the next batch is
            known, ``"prior"`` and ``"delayed"``: rows whose gradient was sent at once, or behind the next step;
            ``"early"`` and ``"rest"``: rows that came during the step before, or when this one began; ``"in vain"``:
            those of the rest that had come early as well.
        foreseen: How many tables' rows were brought before they were looked up.
        exposed: Seconds in which training stood still for others; None where waiting is not recorded.
    """

    sent: Mapping[str, int]
    received: Mapping[str, int]
    rows: Mapping[str, int] = field(default_factory=dict)
    foreseen: int = 0
    exposed: float | None = None

    @property
    def sent_in_steps(self) -> int:
        """Bytes sent for training steps, all kinds together."""
        return sum(size for kind, size in self.sent.items() if kind not in Traffic.OUTSIDE_STEPS)

    def share(self, of: Literal["unique", "prior", "early"]) -> float | None:
        """The part of some rows in those of their sort, 0 to 1; None where there were none."""
        some, others = (self.rows.get(name, 0) for name in _SHARES[of])
        return some / (some + others) if some + others else None


class StepReader:
    """Reads counters at every step's end.

    Args:
        traffic: What is sent.
        session: What trains.
        timeline: What is waited for; None where that is not recorded.
    """

    def __init__(self, traffic: Traffic, session: Session, timeline: Timeline | None) -> None:
        self._traffic, self._session, self._timeline = traffic, session, timeline
        self._before = self._counters()
        self._next = session.step
        self._told: dict[int, float] = {}

    def read(self) -> StepCost:
        """What was counted since the last reading."""
        now = self._counters()
        grown = {
            name: {kind: count - self._before[name].get(kind, 0) for kind, count in counts.items()}
            for name, counts in now.items()
        }
        self._before = now
        foresight = self._session.foresight
        ahead = {} if foresight is None else foresight.counts
        foreseen = 0 if foresight is None else len(foresight.planned)
        return StepCost(grown["sent"], grown["received"], {**grown["ids"], **ahead}, foreseen, self._exposed())

    def _counters(self) -> dict[str, dict[str, int]]:
        tables = self._session.tables
        unique, ids = sum(t.unique for t in tables), sum(t.looked_up for t in tables)
        return {
            "sent": dict(self._traffic.sent),
            "received": dict(self._traffic.received),
            "ids": {"unique": unique, "repeated": ids - unique},
        }

    def _exposed(self) -> float | None:
        if self._timeline is None:
            return None
        # the step before is looked at again: what was waited for between the steps belongs to it
        steps = range(max(0, self._next - 1), self._session.step)
        spans = self._timeline.recording(steps.start).spans
        exposed = {step: summarise(spans, step).exposed for step in steps}
        seconds = sum(exposed.values()) - self._told.get(steps.start, 0.0)
        self._next, self._told = self._session.step, {step: exposed[step] for step in steps[-1:]}
        return seconds
