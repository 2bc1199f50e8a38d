"""Runs the commands of :mod:`examples.benchmarks.netplan` on this machine, and finds out what the machine can do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from examples.benchmarks import netplan
from examples.benchmarks.kernel import NAMESPACES
from examples.benchmarks.netplan import Link, Names, Owner

_COMMAND_TIMEOUT_S = 30
MARK = "EMBRACE_CLUSTER"  # in the environment of every process of a cluster, and of all that it starts


class CommandError(RuntimeError):
    """A command of the plan failed; the message holds it and what it said.

    Args:
        command: The command.
        said: What it said.
    """

    def __init__(self, command: list[str], said: str) -> None:
        super().__init__(f"{' '.join(command)}: {said}")
        self.said = said


def run(command: list[str]) -> str:
    """Runs one command and returns what it prints. Ctrl-C in the terminal does not reach it."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_COMMAND_TIMEOUT_S,
        start_new_session=True,
    )
    if done.returncode != 0:
        raise CommandError(command, done.stderr.strip() or f"exit status {done.returncode}")
    return done.stdout


@dataclass(frozen=True)
class Ability:
    """What this machine can do.

    Attributes:
        namespaces: Namespaces, cables, a bridge and the shaper ``tbf``.
        delay: Also ``netem``.
        why_not: What stands in the way of the first that is missing.
    """

    namespaces: bool
    delay: bool
    why_not: str = ""


def ability(names: Names) -> Ability:
    """Finds out by building a cluster of one rank under the given names, first without, then with a delay."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return Ability(False, False, f"{' and '.join(missing)} not found (package iproute2)")
    if os.geteuid() != 0:
        return Ability(False, False, "not root")
    try:
        for command in netplan.building(names, [Link(rate=10**9)]):
            run(command)
        try:
            for command in netplan.shaping(names.switch, "br0", Link(rate=None, delay_s=1e-3)):
                run(command)
        except CommandError as error:
            return Ability(True, False, error.said)
        return Ability(True, True)
    except CommandError as error:
        return Ability(False, False, str(error))
    finally:
        remove(names)


def namespaces() -> list[str]:
    """All named namespaces of this machine, whoever made them."""
    return os.listdir(NAMESPACES) if NAMESPACES.is_dir() else []


def folder(names: Names) -> Path:
    """Where a cluster's temporary files are."""
    return Path(tempfile.gettempdir()) / names.folder


def remove(names: Names) -> None:
    """Kills what still runs in a cluster and removes its namespaces and files. What is gone already is no error."""
    kill_members(names)
    shutil.rmtree(folder(names), ignore_errors=True)
    for namespace in netplan.belonging_to(names, namespaces()):
        try:
            run(netplan.removing(namespace))
        except CommandError:
            if namespace in namespaces():
                raise


def remove_stale() -> list[Names]:
    """Removes the clusters whose owner is dead, and returns them. Without root only files can be left to remove."""
    places = [*os.listdir(tempfile.gettempdir()), *(namespaces() if os.geteuid() == 0 else [])]
    alive = [names.owner for names in netplan.clusters_among(places) if owner_of(names.owner.pid) == names.owner]
    stale = netplan.stale_clusters(places, alive)
    for names in stale:
        remove(names)
    return stale


def owner_of(pid: int) -> Owner | None:
    """Identifies the process that has this pid now, None when there is none."""
    try:
        started = netplan.started_at(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Owner(pid, started) if started is not None else None


def members(names: Names) -> list[int]:
    """Process ids of a cluster: the ranks and all that they started. They carry :data:`MARK` in their environment."""
    mark = f"{MARK}={names.cluster}".encode()
    return [pid for pid in _processes() if pid != os.getpid() and mark in _environment(pid)]


def kill_members(names: Names, patience_s: float = 10.0) -> None:
    """Kills every process of a cluster, and waits until none is left (zombies have no environment any more)."""
    deadline = time.monotonic() + patience_s
    while pids := members(names):
        for pid in pids:
            with suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"Processes of {names.cluster} do not die: {pids}.")
        time.sleep(0.01)


def _processes() -> Iterable[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # ended meanwhile, or another user's
        return []
