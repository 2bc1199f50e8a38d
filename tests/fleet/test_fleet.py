"""Tasks of a fleet train as they would alone."""

from __future__ import annotations

from pathlib import Path

from tests.fleet import zoo
from tests.fleet.runs import assert_as_plain, assert_nothing_left, fleet_of


def test_three_on_two_devices(tmp_path: Path) -> None:
    """Each is bit-equal to its plain run, and devices changed hands amid batches."""
    fleet = fleet_of([zoo.task(0), zoo.task(1), zoo.task(2)], tmp_path / "fleet", policy="fifo")
    results = fleet.fit()
    assert [(r.name, r.error) for r in results] == [(f"task {n}", None) for n in range(3)]
    assert_as_plain(fleet, [r.name for r in results], tmp_path / "plain")
    assert all(Path(r.checkpoint_path or "").is_file() and "val_loss" in r.metrics for r in results)
    assert len(fleet.leases) > 30 and sum(fleet.yields.values()) > 20, fleet.yields
    assert_nothing_left(fleet.config.folder)
