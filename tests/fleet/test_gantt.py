"""Who had which device when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_embrace.fleet.gantt import from_zero, idle_shares, write_gantt
from lightning_embrace.fleet.lease import Lease

LEASES = [Lease("b", "d1", 11.0, 14.0), Lease("a", "d0", 10.0, 12.0), Lease("b", "d0", 14.0, 20.0)]


def test_idle_shares() -> None:
    """Of the time from the first lease to the last; a device that nobody had is idle all the time."""
    assert idle_shares(LEASES, ["d0", "d1", "d2"]) == pytest.approx({"d0": 0.2, "d1": 0.7, "d2": 1.0})
    assert idle_shares([], ["d0"]) == {"d0": 0.0}


def test_what_is_written(tmp_path: Path) -> None:
    """Seconds since the first lease, in order; a fleet that had none has no picture."""
    write_gantt(LEASES, ["d0", "d1"], tmp_path)
    content = json.loads((tmp_path / "gantt.json").read_text())
    assert [(s["task"], s["device"], s["start"], s["end"]) for s in content["leases"]] == [
        ("a", "d0", 0.0, 2.0), ("b", "d1", 1.0, 4.0), ("b", "d0", 4.0, 10.0),
    ]  # fmt: skip
    assert (tmp_path / "gantt.png").exists()
    write_gantt([], ["d0"], tmp_path / "none")
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["gantt.json"] and from_zero([]) == []
