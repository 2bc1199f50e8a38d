"""Tasks of a fleet train as they would alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_embrace.fleet.fleet import HydraFleet
from lightning_embrace.fleet.policy import POLICIES
from tests.fleet import zoo
from tests.fleet.runs import assert_as_plain, assert_nothing_left, fleet_of


def check_gantt(fleet: HydraFleet) -> None:
    """The leases of all tasks, of which no two have a device at a time."""
    content = json.loads((fleet.config.folder / "gantt.json").read_text())
    assert {lease["task"] for lease in content["leases"]} == set(fleet.tasks)
    assert len(content["leases"]) == len(fleet.leases) and content["leases"][0]["start"] == 0.0
    assert set(content["idle"]) == set(fleet.config.names)
    assert (fleet.config.folder / "gantt.png").read_bytes().startswith(b"\x89PNG")


def check(policy: str, tasks: int, devices: int, folder: Path) -> None:
    """Each task is bit-equal to its plain run, whatever devices do."""
    memory = {1: "120KiB", 2: "240KiB"}[2 if tasks > devices else 1]
    together = zoo.Together(folder / "begun", min(tasks, 2 * devices))
    made = [zoo.task(n, extra=(together,)) for n in range(tasks)]
    fleet = fleet_of(made, folder / "fleet", policy=policy, devices=devices, memory=memory)
    results = fleet.fit()
    assert [(r.name, r.error) for r in results] == [(f"task {n}", None) for n in range(tasks)]
    assert_as_plain(fleet, [r.name for r in results], folder / "plain")
    assert all(Path(r.checkpoint_path or "").is_file() and "val_loss" in r.metrics for r in results)
    assert_nothing_left(fleet.config.folder)
    assert "2 ×" in (fleet.config.folder / "task 0" / "log.txt").read_text(), "no shard has moved"
    check_gantt(fleet)
    yields = sum(fleet.yields.values())
    if policy == "task":
        assert yields == 0 and len(fleet.leases) == tasks
    elif tasks > devices and policy != "lrtf":  # which lets the longer one go on to its end, once it is known
        assert yields > 20, f"{fleet.yields}: devices changed hands between batches alone"


def test_three_on_two_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is bit-equal to its plain run, and devices changed hands amid batches; lines say what became of them."""
    check("fifo", 3, 2, tmp_path)
    lines = capsys.readouterr().out
    assert all(f"] task {n}: running" in lines and f"] task {n}: finished, val_loss " in lines for n in range(3))
    assert "] idle: cpu:0 " in lines


def test_two_on_one_device(tmp_path: Path) -> None:
    """The longest first."""
    check("lrtf", 2, 1, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("tasks", [2, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(policy: str, tasks: int, devices: int, tmp_path: Path) -> None:
    """The whole product."""
    check(policy, tasks, devices, tmp_path)
