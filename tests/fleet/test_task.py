"""What is refused before a task starts, and what a task may be."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from lightning_embrace import HydraFleet, Task, grid
from tests.fleet import zoo


def fleet(tasks: list[Any], folder: Path, **arguments: Any) -> HydraFleet:
    return HydraFleet(tasks, folder=folder / "fleet", **arguments)


def test_names(tmp_path: Path) -> None:
    """Folders have them: they are different, and no paths. Without one it is the place in the list."""
    with pytest.raises(ValueError, match=r"two tasks are named 'task 0'.*another name"):
        fleet([zoo.task(0), zoo.task(0)], tmp_path)
    for name in ("", "a/b", "..", ".hidden", "a\n"):
        with pytest.raises(ValueError, match="no name of a folder"):
            fleet([replace(zoo.task(0), name=name)], tmp_path)
    assert list(fleet([replace(zoo.task(n), name=None) for n in range(2)], tmp_path).tasks) == ["task-0", "task-1"]


def test_no_tasks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no tasks"):
        fleet([], tmp_path)
    with pytest.raises(TypeError, match=r"task 0 is 3\. Give a list of Task"):
        fleet([3], tmp_path)


@pytest.mark.parametrize("name", ["strategy", "devices", "accelerator", "num_nodes"])
def test_what_the_fleet_owns(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"trainer_kwargs of task 'task 0' have '{name}'.*Leave it out"):
        fleet([zoo.task(0, **{name: "auto"})], tmp_path)
    with pytest.raises(ValueError, match="strategy_kwargs of task 'task 0' have 'device_memory', 'disk'"):
        fleet([replace(zoo.task(0), strategy_kwargs={"device_memory": 1, "disk": "x"})], tmp_path)


def test_what_cannot_be_sent(tmp_path: Path) -> None:
    """The part is named; what is made of local functions can be."""
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"factory of task 'a' cannot be sent .*Give a function of a module"):
        fleet([Task(lambda: zoo.Noisy(lock), name="a")], tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loaders of task 'a'"):
        fleet([Task(zoo.Noisy, loaders=lambda: lock, name="a")], tmp_path)
    rate = 0.5
    sent = cloudpickle.dumps(fleet([Task(lambda: zoo.Noisy(rate), name="a")], tmp_path).tasks["a"].job)
    assert isinstance(cloudpickle.loads(sent)[0](), zoo.Noisy)
    assert not (tmp_path / "fleet").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "longest"}, r"policy='longest'\): allowed are 'lrtf', 'fifo', 'random', 'task'"),
        ({"devices": 0}, r"HydraFleet\(devices=0\): give a whole number"),
        ({"threads": 1.5}, r"threads=1.5\)"),
        ({"memory": "much"}, r"HydraFleet\(memory='much'\): give bytes"),
        ({"max_wait": 0}, r"max_wait=0\): give seconds"),
        ({"hang_limit": -1}, r"hang_limit=-1\)"),
        ({"accelerator": "tpu"}, r"accelerator='tpu'\): allowed are 'cpu', 'cuda'"),
        ({"accelerator": "cuda", "devices": 99}, r"devices=99\): this machine has \d+ of them"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        fleet([zoo.task(0)], tmp_path, **arguments)


def test_shares(tmp_path: Path) -> None:
    """A device's memory is that of all its seats; there are two where tasks are more than devices."""
    made = fleet([zoo.task(n) for n in range(5)], tmp_path, devices=2, memory=100, host_memory=40)
    five, two, one = made.config.shares(5), made.config.shares(2), made.config.shares(1)
    assert (len(five.seats), five.device_memory, five.host_memory) == (4, 50, 10)
    assert (len(two.seats), two.device_memory, two.host_memory) == (2, 100, 20)
    assert (len(one.seats), one.device_memory) == (1, 100)
    few = fleet([zoo.task(n) for n in range(5)], tmp_path, devices=2, memory=100, max_live=3).config.shares(5)
    assert (len(few.seats), few.device_memory) == (3, 50)


def test_grid() -> None:
    """Each combination, named by its values unless the task has a name."""
    tasks = grid(lambda lr, depth: Task(zoo.Noisy, trainer_kwargs={"max_epochs": depth}), lr=[0.1, 1e-3], depth=[2, 4])
    assert [t.name for t in tasks] == ["lr=0.1,depth=2", "lr=0.1,depth=4", "lr=0.001,depth=2", "lr=0.001,depth=4"]
    assert [t.trainer_kwargs["max_epochs"] for t in tasks] == [2, 4, 2, 4]
    assert grid(lambda way: Task(zoo.Noisy, name="mine"), way=["a/b"])[0].name == "mine"
    assert grid(lambda way: Task(zoo.Noisy), way=["a/b"])[0].name == "way=a_b"
