"""A task that fails hurts no other one, is reported, and can go on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from lightning_embrace import Task
from tests.fleet import zoo
from tests.fleet.runs import assert_as_plain, assert_nothing_left, fleet_of, of

#: what goes wrong, and what is said of it
FAULTS = {
    "raise": "ZeroDivisionError: a bug of the user's",
    "kill": "its process was ended by SIGKILL (the kernel sends it where memory runs out)",
    "hang": "it said nothing for",
    "memory": "RuntimeError: ",
    "exit": "its process ended with code 3",
}


def check(faults: list[str], folder: Path, goes_on: bool = True, **arguments: object) -> None:
    """Tasks of which all but the first go wrong in their second epoch; then the fleet goes on."""
    tasks = [zoo.task(0)]
    for index, fault in enumerate(faults, start=1):
        once = folder / f"{fault} was done"
        tasks.append(zoo.task(index, extra=(zoo.At(11, fault, once),)))
    settings = {"disk": folder / "disk", "host_memory": 1 << 30, **arguments}
    (folder / "disk").mkdir()
    fleet = fleet_of(tasks, folder / "fleet", hang_limit=10.0, **settings)
    good, *bad = fleet.fit()
    assert good.error is None
    assert_as_plain(fleet, [good.name], folder / "plain")
    for fault, result in zip(faults, bad):
        assert result.error is not None and result.error.startswith(FAULTS[fault]), result.error
        log = fleet.config.folder / result.name / "log.txt"
        assert f"its log: {log}" in result.error and log.is_file()
        assert result.metrics == {} and Path(result.checkpoint_path or "").is_file()
    assert_nothing_left(fleet.config.folder)
    assert list((folder / "disk").iterdir()) == []
    if not goes_on:
        return
    # finished tasks keep their results, and the others go on from the end of their first epoch
    again = fleet_of(tasks, folder / "fleet", **settings)
    results = again.fit(resume=True)
    assert results[0] == good and [r.error for r in results] == [None] * len(tasks)
    assert_as_plain(again, [r.name for r in results], folder / "plain")
    assert {lease.task for lease in again.leases} == {r.name for r in bad}
    assert again.fit(resume=True) == results and again.leases == []


def test_is_killed(tmp_path: Path) -> None:
    """Amid a batch in which it has the only device: another one has it next."""
    check(["kill"], tmp_path, goes_on=False, devices=1, policy="fifo")


@pytest.mark.matrix
def test_every_fault(tmp_path: Path) -> None:
    """Also under limits of devices and seats: what a task leaves is another's."""
    check(list(FAULTS), tmp_path, policy="fifo")


@pytest.mark.matrix
def test_too_little_memory(tmp_path: Path) -> None:
    """Is the error of the task that is too large."""
    tasks = [zoo.task(0), Task(partial(zoo.Wide, 400), zoo.task(1).loaders, zoo.task(1).trainer_kwargs, "wide")]
    fleet = fleet_of(tasks, tmp_path / "fleet", memory="120KiB")
    good, wide = fleet.fit()
    assert good.error is None and wide.checkpoint_path is None
    assert wide.error is not None and "DoesNotFitError" in wide.error and "device_memory" in wide.error
    assert_as_plain(fleet, ["task 0"], tmp_path / "plain")
    assert_nothing_left(fleet.config.folder)


@pytest.mark.matrix
def test_early_stopping_frees_a_share(tmp_path: Path) -> None:
    """A task that stops early leaves, and the next one has its seat; its last checkpoint is the trained model."""
    stops = EarlyStopping("val_loss", mode="max", patience=1, stopping_threshold=-1.0)
    tasks = [zoo.task(0, epochs=50, extra=(stops,)), zoo.task(1)]
    fleet = fleet_of(tasks, tmp_path / "fleet", devices=1, max_live=1, memory="120KiB")
    assert [r.error for r in fleet.fit()] == [None, None]
    first, second = fleet.leases
    assert (first.task, second.task) == ("task 0", "task 1") and first.end <= second.start
    assert_as_plain(fleet, list(fleet.tasks), tmp_path / "plain")
    assert of(fleet.config.folder / "task 0").losses == of(tmp_path / "plain" / "task 0").losses


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["datamodule", "own", "stateful", "workers", "instance"])
def test_kinds_of_data(kind: str, tmp_path: Path) -> None:
    """Wherever loaders come from, a task that is killed amid an epoch goes on exactly."""
    extra = (zoo.At(13, "kill", tmp_path / "killed"),)
    task = zoo.task(0, extra=extra)
    task = replace(task, loaders=partial(zoo.data, kind), factory=zoo.Own if kind == "own" else task.factory)
    if kind == "instance":
        task = replace(task, factory=zoo.Noisy(), loaders=zoo.loaders())
    fleet = fleet_of([task], tmp_path / "fleet", checkpoint_every=5)
    assert fleet.fit()[0].error is not None
    step = torch.load(tmp_path / "fleet" / "task 0" / "last.ckpt", weights_only=True)["global_step"]
    assert step == 10
    assert fleet_of([task], tmp_path / "fleet", checkpoint_every=5).fit(resume=True)[0].error is None
    assert_as_plain(fleet, ["task 0"], tmp_path / "plain")
