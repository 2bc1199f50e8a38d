"""What is noted while a model of the benchmarks of ``hydra`` trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from examples.benchmarks.own_ranks import status
from lightning_embrace.hydra.traffic import traffic


def _block_io() -> dict[str, int]:
    """Bytes that this process has had block devices read and write so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read": int(fields["read_bytes"]), "written": int(fields["write_bytes"])}


class Watch(Callback):
    """Notes times and bytes at the beginning and end of steps.

    Args:
        steps: How many there will be. The first two are not in the steady state.
        began: When the run began, by ``time.perf_counter``.

    Attributes:
        found: Part of the run's result.
        peak: VmHWM by stage.
        at_end: Called when training is over, and the model has not become an ordinary one again.
    """

    def __init__(self, steps: int, began: float) -> None:
        self.found: dict[str, Any] = {"seconds": []}
        self.peak: dict[str, int] = {}
        self.at_end: Callable[[], None] | None = None
        self._steps = steps
        self._started = began
        self._before: dict[str, float] = {}
        self._transfers: dict[str, float] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """The model is built."""
        self.peak["built"] = status("VmHWM")
        self.found["built"] = time.perf_counter() - self._started

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """A step begins."""
        if batch_idx == 2:
            self._before, self._transfers = _bytes(trainer), _moving(trainer)
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A step ends; the last one closes the account."""
        self.found["seconds"].append(time.perf_counter() - self._began)
        if batch_idx == self._steps - 1 and self._before:
            self.found["transfers"] = {
                name: seconds - self._transfers[name] for name, seconds in _moving(trainer).items()
            }
            self.found["moved"] = {
                name: (value - self._before.get(name, 0)) / (self._steps - 2) for name, value in _bytes(trainer).items()
            }

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """What was planned, beside what it took."""
        self.peak["trained"] = status("VmHWM")
        planned = getattr(trainer.strategy, "planned", None)
        if planned is None:
            return
        self.found["plan"] = dict(traffic(planned.units, planned.plan, planned.budget.spilled_gradients))
        self.found["places"] = {place: planned.plan.places.count(place) for place in ("device", "host", "disk")}
        self.found["slots"] = [planned.plan.slots, planned.plan.slot_bytes]
        session = trainer.strategy._session
        self.found["accounts"] = {tier: ledger.peak for tier, ledger in session.ledgers.items()}
        if planned.plan.shards:
            self.found["shards"] = dict(session.transfer.counts)
        if self.at_end is not None:
            self.at_end()


def _spilled(trainer: Any) -> Any:
    """The session of a model of which some moves, or None."""
    session = getattr(trainer.strategy, "_session", None)
    return session if session is not None and session.shards else None


def _moving(trainer: Any) -> dict[str, float]:
    session = _spilled(trainer)
    return {} if session is None else dict(session.transfer.seconds)


def _bytes(trainer: Any) -> dict[str, float]:
    """Counted so far, when all that was to be written is."""
    session = _spilled(trainer)
    moved: dict[str, float] = {}
    if session is not None:
        session.transfer.settle()
        moved.update(session.store.traffic)
    return moved | {f"blocks {kind}": count for kind, count in _block_io().items()}
