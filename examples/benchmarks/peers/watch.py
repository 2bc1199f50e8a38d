"""What ``embrace`` knows of its steps: payload by kind, prior, delayed and early rows, and where it stood still."""

from __future__ import annotations

from typing import Any

from lightning_embrace.monitor.summary import summarise


class Watch:
    """Reads a strategy's counters at every step boundary.

    Args:
        strategy: An ``EmbRaceStrategy``.
        warmup: Steps that are not kept.
    """

    def __init__(self, strategy: Any, warmup: int) -> None:
        self._strategy, self._warmup = strategy, warmup
        self._before: dict[str, int] = {}
        self._about: dict[str, Any] = {}

    def step(self) -> dict[str, float]:
        """Call at the end of every step: bytes sent (``sent rows``, …) and received in it, and rows by kind."""
        traffic = self._strategy.traffic
        now = {f"sent {kind}": size for kind, size in dict(traffic.sent).items()}
        now |= {f"received {kind}": size for kind, size in dict(traffic.received).items()}
        counts: dict[str, float] = {name: size - self._before.get(name, 0) for name, size in now.items()}
        self._before = now
        foresight = self._strategy._session.foresight
        if foresight is not None:
            counts |= {**foresight.counts, "tables foreseen": len(foresight.planned)}
        return counts

    def end(self) -> None:
        """Call before the strategy's teardown."""
        strategy = self._strategy
        self._about = {
            "tables": len(strategy._session.tables),
            "relaxed": strategy._session.relaxed,
            "barrier because": strategy._barrier_because,
            "blind because": strategy._blind_because,
        }
        timeline = strategy._timeline
        if timeline is not None:
            recording = timeline.recording()
            steps = sorted({span.step for span in recording.spans if span.step is not None})[self._warmup :]
            self._about["exposed"] = [summarise(recording.spans, step).exposed for step in steps]

    def result(self) -> dict[str, Any]:
        """For the record of this rank, after the training."""
        traffic = self._strategy.traffic
        counted = {"sent": dict(traffic.sent), "received": dict(traffic.received), "steps": traffic.steps}
        return {"counted": counted, "about": self._about}
