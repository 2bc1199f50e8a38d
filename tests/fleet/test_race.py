"""A fleet whose best tasks go on."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_embrace import SuccessiveHalving
from lightning_embrace.fleet.manifest import Entry
from lightning_embrace.fleet.protocol import Pause
from lightning_embrace.fleet.race import Race
from tests.fleet import zoo
from tests.fleet.runs import assert_as_plain, assert_nothing_left, fleet_of, of, plain
from tests.fleet.test_stopping import states, when

HALVING = SuccessiveHalving("val_loss", 1)


def validations(folder: Path) -> list[float]:
    """The loss of each validation, as a task has written it."""
    lines = [line.split() for line in (folder / zoo.LOSSES).read_text().splitlines()]
    return [float.fromhex(loss) for where, loss in lines if where.startswith("val-")]


def losses(folder: Path) -> list[float]:
    return of(folder).losses


def test_manifest() -> None:
    """What is decided is in the entries; who is alone, or without halving, has no pause."""
    entries = {"a": Entry("paused", rungs=[2.0]), "b": Entry("paused", rungs=[1.0]), "c": Entry("finished")}
    race = Race(HALVING, entries)
    assert list(race.judge()) == ["b"] and list(race.judge()) == []
    assert [e.state for e in entries.values()] == ["dropped", "waiting", "finished"]
    assert (entries["a"].dropped or "").startswith("successive halving: number 2 of 2 at epoch 1, val_loss 2")
    assert race.pause("b") is None
    entries["a"].state = "interrupted"
    assert race.pause("b") == Pause("val_loss", "epochs", 2)
    assert Race(None, entries).pause("b") is None and list(Race(None, entries).judge()) == []


def test_lower_rungs_first() -> None:
    """Who comes late and ends lets the others be judged at once."""
    entries = {"a": Entry("paused", rungs=[1.0, 1.0]), "b": Entry("paused", rungs=[1.0, 2.0])}
    entries["late"] = Entry("paused", rungs=[3.0])
    assert list(Race(HALVING, entries).judge()) == ["a"]
    assert [e.state for e in entries.values()] == ["waiting", "dropped", "dropped"]


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_best_goes_on(count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tasks on one device, two at a time: after an epoch the best goes on alone, bit-equal to its plain run.

    The others end with what they had, which is no error, and stay so for a fleet that goes on.
    """
    folder, tasks = tmp_path / "fleet", [zoo.task(n) for n in range(count)]
    fleet = fleet_of(tasks, folder, devices=1, halving=HALVING)
    results = fleet.fit()
    for name in fleet.tasks:
        plain(fleet.tasks[name], tmp_path / "plain" / name)
    first = {name: validations(tmp_path / "plain" / name)[0] for name in fleet.tasks}
    best = min(first, key=lambda name: first[name])
    assert [r.name for r in results if r.dropped is None] == [best] and [r.error for r in results] == [None] * count
    assert_as_plain(fleet, [best], tmp_path / "plain")
    for result in results:
        if result.name != best:
            assert result.metrics["val_loss"] == first[result.name]
            assert f"of {count} at epoch 1, val_loss {first[result.name]:.4g}, and 1 went on" in (result.dropped or "")
            step = torch.load(result.checkpoint_path or "", weights_only=True)["global_step"]
            assert step == 8 and validations(folder / result.name) == [first[result.name]]
    lines = capsys.readouterr().out
    assert ": dropped, successive halving: number " in lines
    assert count == 2 or ": paused, val_loss " in lines  # live ones are judged as soon as the last one is there
    assert_nothing_left(folder)
    again = fleet_of(tasks, folder, devices=1, halving=HALVING)
    assert again.fit(resume=True) == results and again.leases == []


@pytest.mark.matrix
def test_interrupted_and_failed(tmp_path: Path) -> None:
    """A fleet that is interrupted while tasks are paused goes on with what it has; who has failed is tried again.

    Rungs are counted in steps here, amid epochs, and there are two of them.
    """
    folder, halving = tmp_path / "fleet", SuccessiveHalving("val_loss", "12 steps", keep=0.5, mode="max")
    failing = (zoo.At(13, "raise", tmp_path / "once"),)
    tasks = [zoo.task(n, epochs=4, extra=failing if n == 1 else (zoo.Slow(),) * (n == 3)) for n in range(4)]

    def fleet() -> object:
        return fleet_of(tasks, folder, halving=halving, policy="fifo", max_live=3)

    when(lambda: (folder / "fleet.json").exists() and "paused" in states(folder).values(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fleet().fit()  # type: ignore[attr-defined]
    assert "paused" in states(folder).values()
    last = fleet()
    results = last.fit(resume=True)  # type: ignore[attr-defined]
    content = json.loads((folder / "fleet.json").read_text())["tasks"]
    rungs = {name: entry["rungs"] for name, entry in content.items()}
    for name in rungs:
        plain(last.tasks[name], tmp_path / "plain" / name)  # type: ignore[attr-defined]
        whole = losses(tmp_path / "plain" / name)
        mine = losses(folder / name)
        assert rungs[name][0] == validations(tmp_path / "plain" / name)[0]
        dropped = content[name]["dropped"] is not None or content[name]["error"] is not None
        assert len(mine) < len(whole) if dropped else mine == whole
    assert sum(r.dropped is None and r.error is None for r in results) == 1
    assert_nothing_left(folder)


@pytest.mark.matrix
def test_metric_that_is_not_logged(tmp_path: Path) -> None:
    """Is the task's error, and says which there are."""
    fleet = fleet_of([zoo.task(0), zoo.task(1)], tmp_path / "fleet", halving=replace(HALVING, monitor="accuracy"))
    errors = [result.error or "" for result in fleet.fit()]
    said = "SuccessiveHalving(monitor='accuracy'): the task has not logged it. Until epoch 1 it has logged 'val_loss'."
    # the other one is alone then, and goes on
    assert sum(said in error for error in errors) >= 1
