"""``fleet.json``: what has become of a fleet's tasks, for whoever goes on, and for people."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from lightning_embrace.checkpoint.atomic import written_whole

NAME = "fleet.json"
_VERSION = 1
#: ``running`` of a fleet that is no more: it was killed
State = Literal["waiting", "running", "finished", "failed", "interrupted", "paused", "dropped"]


@dataclass
class Entry:
    """A task.

    Attributes:
        state: What it does.
        attempts: How often it was started.
        metrics: What was logged last, of a task that is finished, paused or dropped.
        error: Why it has failed.
        step: Of the optimizer, when its process ended last.
        loss: Of its last batch then, or None.
        rungs: Of successive halving: the metric at each that it has reached.
        dropped: Why it was not to go on, or None.
    """

    state: State = "waiting"
    attempts: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    step: int = 0
    loss: float | None = None
    rungs: list[float] = field(default_factory=list)
    dropped: str | None = None


class Manifest:
    """The file of a fleet's folder.

    Args:
        folder: The fleet's.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self.entries: dict[str, Entry] = {}
        if self._path.exists():
            content = json.loads(self._path.read_text())
            if content.get("version") != _VERSION:
                raise ValueError(
                    f"HydraFleet: {self._path} is of version {content.get('version')}, and this program reads version"
                    f" {_VERSION}. Go on with the program that wrote it, or give another folder."
                )
            self.entries = {name: Entry(**entry) for name, entry in content["tasks"].items()}

    def write(self) -> None:
        """Replaces the file. Whoever reads meanwhile finds the old one or the new one."""
        content = {"version": _VERSION, "tasks": {name: asdict(entry) for name, entry in self.entries.items()}}
        with written_whole(str(self._path)) as file:
            file.write(json.dumps(content, indent=1).encode())


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Makes a folder; inside, no other fleet works in it.

    Args:
        folder: The fleet's.

    Raises:
        RuntimeError: Another one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(
                f"HydraFleet: another fleet is at work in {folder}. Wait for its end, or give another folder."
            ) from error
        yield
    finally:
        os.close(handle)
