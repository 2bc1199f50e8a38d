"""What a user can choose of a fleet, checked once, and what follows for its tasks."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_embrace.fleet.policy import POLICIES
from lightning_embrace.hydra.sizes import HOST_SHARE, parse_bytes, usable_bytes

_OWNER = "HydraFleet"


@dataclass(frozen=True)
class Shares:
    """What each live task has.

    Attributes:
        seats: The device of each task that is live at a time; None: any.
        device_memory: Bytes.
        host_memory: Bytes.
        threads: Of torch.
    """

    seats: tuple[str | None, ...]
    device_memory: int
    host_memory: int
    threads: int


@dataclass(frozen=True)
class FleetConfig:
    """The validated arguments of :class:`~lightning_embrace.HydraFleet`, which says what they mean."""

    devices: int
    memory: int
    host_memory: int | None
    disk: Path | None
    policy: str
    threads: int | None
    max_live: int | None
    max_wait: float | None
    hang_limit: float | None
    folder: Path
    checkpoint_every: int | None
    accelerator: str
    seed: int

    @classmethod
    def checked(
        cls,
        devices: int,
        memory: int | str,
        host_memory: int | str | None,
        disk: str | Path | None,
        policy: str,
        threads: int | None,
        max_live: int | None,
        max_wait: float | None,
        hang_limit: float | None,
        folder: str | Path,
        checkpoint_every: int | None,
        accelerator: str,
        seed: int,
    ) -> FleetConfig:
        """Validates the arguments as a user writes them.

        Raises:
            ValueError: An argument has a value that is not allowed; the message says which are.
        """
        if policy not in POLICIES:
            raise ValueError(f"{_OWNER}(policy={policy!r}): allowed are {', '.join(map(repr, POLICIES))}.")
        counts = {"devices": devices, "threads": threads, "max_live": max_live, "checkpoint_every": checkpoint_every}
        for name, count in counts.items():
            if count is None and name != "devices":
                continue
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"{_OWNER}({name}={count!r}): give a whole number from 1 on.")
        for name, seconds in (("max_wait", max_wait), ("hang_limit", hang_limit)):
            if seconds is not None and not (isinstance(seconds, (int, float)) and seconds > 0):
                raise ValueError(f"{_OWNER}({name}={seconds!r}): give seconds, more than 0, or None.")
        if accelerator not in ("cpu", "cuda", "gpu"):
            raise ValueError(f"{_OWNER}(accelerator={accelerator!r}): allowed are 'cpu', 'cuda'.")
        if accelerator != "cpu" and devices > torch.cuda.device_count():
            raise ValueError(
                f"{_OWNER}(accelerator={accelerator!r}, devices={devices}): this machine has"
                f" {torch.cuda.device_count()} of them."
            )
        return cls(
            devices,
            parse_bytes("memory", memory, _OWNER),
            None if host_memory is None else parse_bytes("host_memory", host_memory, _OWNER),
            None if disk is None else Path(disk).absolute(),
            policy,
            threads,
            max_live,
            max_wait,
            hang_limit,
            Path(folder).absolute(),
            checkpoint_every,
            "cpu" if accelerator == "cpu" else "cuda",
            seed,
        )

    @property
    def names(self) -> list[str]:
        """The devices'."""
        return [f"{self.accelerator}:{index}" for index in range(self.devices)]

    @property
    def movable(self) -> bool:
        """On the CPU a device is a slot: a live task computes on any of them."""
        return self.accelerator == "cpu"

    def shares(self, tasks: int) -> Shares:
        """Divides the machine.

        Args:
            tasks: How many there are.

        Returns:
            What each live task has for as long as it lives, so that nothing has to leave a device for another task.
        """
        live = min(tasks, self.max_live or 2 * self.devices)
        each = math.ceil(live / self.devices)
        host = self.host_memory or int(usable_bytes() * HOST_SHARE)
        return Shares(
            tuple(None if self.movable else self.names[n % self.devices] for n in range(live)),
            max(1, self.memory // each),
            max(1, host // live),
            self.threads or max(1, len(os.sched_getaffinity(0)) // self.devices),
        )
