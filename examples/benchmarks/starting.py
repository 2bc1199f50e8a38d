"""How the process of a rank comes to be. By itself each one is a program that is started anew."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from examples.benchmarks import kernel, netplan


@dataclass(frozen=True)
class Start:
    """A rank that is to be started.

    Attributes:
        command: Program and arguments.
        environment: All of its environment.
        stdout: File for what it prints.
        stderr: The same for errors.
        namespace: The network namespace it belongs in; None: this process' own.
        cwd: Where it runs; None: where this process does.
    """

    command: list[str]
    environment: dict[str, str]
    stdout: Path
    stderr: Path
    namespace: str | None = None
    cwd: Path | None = None

    def to_fields(self) -> dict[str, Any]:
        """For another process, as JSON has it."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Start:
        """The inverse of :meth:`to_fields`."""
        paths = {name: Path(fields[name]) for name in ("stdout", "stderr", "cwd") if fields[name] is not None}
        return cls(**{**fields, **paths})


class Process(Protocol):
    """What :class:`subprocess.Popen` has of this is all that the launcher needs."""

    returncode: Any
    """Exit status; negative: the signal that ended it; None while it is not known to have ended."""

    def poll(self) -> int | None:
        """Looks whether it has ended, and returns its exit status."""

    def kill(self) -> None:
        """Has it killed; nothing where it has ended."""

    def wait(self) -> int:
        """Returns its exit status once it has ended."""


Starter = Callable[[Start], Process]


def anew(start: Start) -> Process:
    """Starts a rank as a new program, which ends with this process."""
    command = netplan.entering(start.namespace, start.command) if start.namespace else start.command
    with ExitStack() as files:
        return subprocess.Popen(
            command,
            env=start.environment,
            cwd=start.cwd,
            stdin=subprocess.DEVNULL,
            stdout=files.enter_context(start.stdout.open("wb")),
            stderr=files.enter_context(start.stderr.open("wb")),
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the ranks
            preexec_fn=partial(kernel.die_with, os.getpid()),
        )
