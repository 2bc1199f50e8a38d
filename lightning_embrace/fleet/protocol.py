"""What a fleet and a task's process say to each other. Knows nothing of how it is carried, and no Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_embrace.fleet.pace import Progress

# ---- what a process is started with ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pause:
    """Where a task saves, and ends for a while.

    Attributes:
        monitor: The metric that is wanted then.
        unit: ``"epochs"`` or ``"steps"`` of the optimizer.
        at: How many, since the task's beginning.
    """

    monitor: str
    unit: str
    at: int


@dataclass(frozen=True)
class Order:
    """A task, and what its process is given of the machine.

    Attributes:
        name: The task's.
        folder: For its checkpoints and its loggers.
        job: A cloudpickle of the task's factory, its loaders, and the Trainer's and the strategy's arguments.
        accelerator: The Trainer's.
        device_memory: Bytes of the device.
        host_memory: Bytes of host memory.
        disk: A folder for the disk tier, or None.
        threads: Of torch.
        seed: What random numbers begin with.
        checkpoint_every: Steps between two checkpoints; None: one at each epoch's end.
        goes_on: Whether to go on from the last checkpoint, if there is one.
        pause: Where to end for a while; None: nowhere.
    """

    name: str
    folder: Path
    job: bytes
    accelerator: str
    device_memory: int
    host_memory: int
    disk: Path | None
    threads: int
    seed: int
    checkpoint_every: int | None
    goes_on: bool
    pause: Pause | None = None


# ---- from a task's process to its fleet --------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """It waits for a device."""

    progress: Progress


@dataclass(frozen=True)
class Give:
    """It holds nothing any more.

    Attributes:
        progress: How far it is.
        again: It waits for a device at once: it is amid a batch.
    """

    progress: Progress
    again: bool


@dataclass(frozen=True)
class Beat:
    """It lives."""

    progress: Progress


@dataclass(frozen=True)
class Finished:
    """It has come to its end.

    Attributes:
        metrics: What was logged last.
        checkpoint: Of the trained model.
    """

    metrics: Mapping[str, float]
    checkpoint: str


@dataclass(frozen=True)
class Failed:
    """It has raised.

    Attributes:
        error: Type and message.
    """

    error: str


@dataclass(frozen=True)
class Stopped:
    """It has ended since it was told to, and can go on from its last checkpoint."""


@dataclass(frozen=True)
class Paused:
    """It has come to its pause, and can go on from its last checkpoint.

    Attributes:
        score: The metric that was wanted.
        metrics: What was logged last.
    """

    score: float
    metrics: Mapping[str, float]


Outcome = Finished | Failed | Stopped | Paused
#: from a task's process
Report = Ask | Give | Beat | Outcome


# ---- from a fleet to a task's process ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Grant:
    """A device is its own.

    Attributes:
        number: Of this grant, among the task's.
    """

    number: int


@dataclass(frozen=True)
class Recall:
    """Another task waits for the device of this grant: give it at the next boundary.

    Where it was given meanwhile, nothing is meant any more.

    Attributes:
        number: Of the grant.
    """

    number: int


@dataclass(frozen=True)
class Stop:
    """Save at the end of the batch, and end."""


#: to a task's process
Command = Grant | Recall | Stop
