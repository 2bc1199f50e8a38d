"""What ``embrace`` knows of its steps: payload by kind, prior, delayed and early rows, and where it stood still."""

from __future__ import annotations

from typing import Any

from lightning_embrace.steps import StepReader


class Watch:
    """Reads a strategy's counters at every step boundary.

    Args:
        strategy: An ``EmbRaceStrategy``.
        warmup: Steps that are not kept.
    """

    def __init__(self, strategy: Any, warmup: int) -> None:
        self._strategy, self._warmup = strategy, warmup
        self._reader: StepReader | None = None
        self._exposed: list[float] = []
        self._about: dict[str, Any] = {}

    def begin(self) -> None:
        """Call before the first step."""
        self._reader = StepReader(self._strategy.traffic, self._strategy._session, self._strategy._timeline)

    def step(self) -> dict[str, float]:
        """Call at the end of every step: bytes sent (``sent rows``, …) and received in it, and rows by kind."""
        assert self._reader is not None
        cost = self._reader.read()
        counts: dict[str, float] = {f"sent {kind}": size for kind, size in cost.sent.items()}
        counts |= {f"received {kind}": size for kind, size in cost.received.items()}
        if cost.exposed is not None:
            self._exposed.append(cost.exposed)
        return {**counts, **cost.rows, "tables foreseen": cost.foreseen}

    def end(self) -> None:
        """Call before the strategy's teardown."""
        strategy = self._strategy
        self._about = {
            "tables": len(strategy._session.tables),
            "relaxed": strategy._session.relaxed,
            "barrier because": strategy._barrier_because,
            "blind because": strategy._blind_because,
        }
        if strategy._timeline is not None:
            self._about["exposed"] = self._exposed[self._warmup :]

    def result(self) -> dict[str, Any]:
        """For the record of this rank, after the training."""
        traffic = self._strategy.traffic
        counted = {"sent": dict(traffic.sent), "received": dict(traffic.received), "steps": traffic.steps}
        return {"counted": counted, "about": self._about}
