"""What is to be trained, and what comes of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle

from lightning_embrace.fleet.layout import is_task_name, task_name

#: of the Trainer; the fleet chooses them
OWNED = ("strategy", "devices", "accelerator", "num_nodes")
#: of HydraStrategy; the same
OWNED_STRATEGY = ("device_memory", "host_memory", "disk", "accelerator", "parallel_devices")


@dataclass(frozen=True)
class Task:
    """A model, its data, and how it is trained. All of it is sent to a process of its own by cloudpickle.

    Args:
        factory: A LightningModule, or a callable without arguments that makes one in the task's process.
        loaders: What ``Trainer.fit`` trains on: a DataLoader, or a tuple of those for training and validation; or a
            LightningDataModule; or a callable without arguments that makes one of these in the task's process. None:
            the model has its own.
        trainer_kwargs: The Trainer's arguments, but for ``strategy``, ``devices``, ``accelerator`` and ``num_nodes``.
        name: Of the task and of its folder. None: a name by the place in the list.
        strategy_kwargs: HydraStrategy's arguments, such as ``blocks``, but for memory and ``disk``.
    """

    factory: Any
    loaders: Any = None
    trainer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    strategy_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def job(self) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
        """What its process is sent."""
        return self.factory, self.loaders, dict(self.trainer_kwargs), dict(self.strategy_kwargs)


@dataclass(frozen=True)
class TaskResult:
    """What has come of a task.

    Attributes:
        name: The task's.
        metrics: The Trainer's ``callback_metrics`` at the end; empty where there was none.
        checkpoint_path: Of the trained model, or the one with which the task would go on. None: there is none.
        error: What went wrong, and where its log is; None: nothing.
        dropped: Why successive halving has ended it early; None: it has not.
    """

    name: str
    metrics: dict[str, float]
    checkpoint_path: str | None
    error: str | None
    dropped: str | None = None


def grid(make: Callable[..., Task], **values: Iterable[Any]) -> list[Task]:
    """A task for each combination of values.

    ``grid(make, lr=[0.1, 0.01], depth=[2, 4])`` calls ``make(lr=0.1, depth=2)``, ``make(lr=0.1, depth=4)`` and so on.

    Args:
        make: Makes a task of keyword arguments. Where it gives no name, the arguments become the name.
        values: What each argument is, in turn.
    """
    tasks = []
    for chosen in itertools.product(*values.values()):
        arguments = dict(zip(values, chosen))
        task = make(**arguments)
        name = ",".join(f"{key}={value}" for key, value in arguments.items())
        tasks.append(task if task.name is not None else replace(task, name=task_name(name)))
    return tasks


def named(tasks: Sequence[Task]) -> dict[str, Task]:
    """Checks tasks before any is started.

    Args:
        tasks: As the user gives them.

    Returns:
        Each with a name.

    Raises:
        ValueError: There is none, names are not different or no names of folders, or a task sets what the fleet does.
        TypeError: Something else than tasks was given, or cloudpickle does not take a part of one.
    """
    found: dict[str, Task] = {}
    for index, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TypeError(f"HydraFleet: task {index} is {task!r}. Give a list of Task(factory, loaders, ...).")
        name = f"task-{index}" if task.name is None else task.name
        if name in found:
            raise ValueError(
                f"HydraFleet: two tasks are named {name!r}, and each has a folder of its name. Give each another name."
            )
        if not isinstance(name, str) or not is_task_name(name):
            raise ValueError(
                f"HydraFleet: Task(name={name!r}) is no name of a folder. Write letters, digits and _=+,@.- and no dot"
                " at the beginning."
            )
        _check_owned(name, task)
        _check_pickles(name, task)
        found[name] = task
    if not found:
        raise ValueError("HydraFleet: there are no tasks. Give a list of Task(factory, loaders, ...).")
    return found


def _check_owned(name: str, task: Task) -> None:
    for what, given, owned in (
        ("trainer_kwargs", task.trainer_kwargs, OWNED),
        ("strategy_kwargs", task.strategy_kwargs, OWNED_STRATEGY),
    ):
        wrong = [key for key in owned if key in given]
        if wrong:
            raise ValueError(
                f"HydraFleet: {what} of task {name!r} have {', '.join(map(repr, wrong))}, and the fleet sets"
                f" {'it' if len(wrong) == 1 else 'them'}. Leave {'it' if len(wrong) == 1 else 'them'} out:"
                " HydraFleet(devices=..., memory=..., host_memory=..., disk=..., accelerator=...) are for all tasks."
            )


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


def _check_pickles(name: str, task: Task) -> None:
    for what in ("factory", "loaders", "trainer_kwargs", "strategy_kwargs"):
        try:
            cloudpickle.CloudPickler(_Nowhere()).dump(getattr(task, what))
        except Exception as error:
            raise TypeError(
                f"HydraFleet: {what} of task {name!r} cannot be sent to a process of its own: {type(error).__name__}:"
                f" {error}. Give a function of a module, or one that cloudpickle takes: it makes open files, locks,"
                " generators and the like itself, when it is called."
            ) from error
