"""Starts ranks that may die, and tells how each of them ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.ranks import become_rank, free_port

#: seconds, reached only by a test that fails; less than the timeout of the victim's exchanges
PATIENCE = 180.0

# fresh processes, forked from a clean one that has imported everything once for all tests
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["lightning_embrace", "tests.support.models", "tests.faults.victim"])


class End(NamedTuple):
    """How a rank ended: its exit code (negative: the signal that ended it) and what it wrote."""

    code: int | None
    output: str

    @property
    def last_line(self) -> str:
        """The exception that ended it."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def notes(self) -> list[str]:
        """The lines of the control channel; Horovod, whose log comes in pieces, may have begun a line before them."""
        return [line for line in self.output.splitlines() if "lightning_embrace] rank " in line]


def _rank_main(
    rank: int, world_size: int, port: int, output: str, function: Callable[[], None], own_session: bool
) -> None:
    if own_session:
        os.setsid()
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    become_rank(rank, world_size, port)
    function()
    print("returned", flush=True)


class World:
    """N ranks as torchrun would start them: nobody kills the others when one fails.

    Args:
        folder: Where their output goes.
        world_size: N.
        function: What each of them runs, with ``LOCAL_RANK`` and the like in its environment.
        own_session: Each has a session of its own, by which its descendants are known: see :func:`in_sessions`.
    """

    def __init__(self, folder: Path, world_size: int, function: Callable[[], None], own_session: bool = False) -> None:
        port = free_port()
        self.outputs = [folder / f"rank-{r}" for r in range(world_size)]
        self.processes = [
            _CONTEXT.Process(target=_rank_main, args=(r, world_size, port, str(self.outputs[r]), function, own_session))
            for r in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def ends(self, ranks: list[int] | None = None, patience: float = PATIENCE) -> list[End]:
        """Waits for ranks, default all; a code of None is a rank that has not ended."""
        deadline = time.monotonic() + patience
        chosen = range(len(self.processes)) if ranks is None else ranks
        for r in chosen:
            self.processes[r].join(max(0.0, deadline - time.monotonic()))
        return [End(self.processes[r].exitcode, self.outputs[r].read_text(errors="replace")) for r in chosen]

    def send(self, rank: int, number: int) -> None:
        """Sends a rank a signal."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def clear(self) -> None:
        """Leaves nothing behind."""
        for process in self.processes:
            process.kill()
            process.join()


class Script:
    """The victim started as a user starts a script; its processes form a process group of their own.

    Args:
        folder: Where its output goes.
        arguments: Of the script.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.output = folder / "output"
        root = Path(__file__).parents[2]
        environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
        environment |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("victim.py")), *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                cwd=folder,
            )

    def await_training(self, ranks: int) -> None:
        """Returns when that many ranks have begun to train, a moment later."""
        deadline = time.monotonic() + PATIENCE
        # without the line's end: two ranks' words and line ends mix in one file
        while self.output.read_text().count("training") < ranks:
            assert time.monotonic() < deadline and self.process.poll() is None, self.output.read_text()
            time.sleep(0.1)
        time.sleep(0.5)

    def end(self, patience: float = PATIENCE) -> End:
        """Waits for the process that was started, and then for all that it has started."""
        deadline = time.monotonic() + patience
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.1)
        return End(self.process.returncode, self.output.read_text(errors="replace"))

    def left(self) -> list[int]:
        """Processes of its session that still run."""
        return in_sessions([self.process.pid])

    def clear(self) -> None:
        """Leaves nothing behind."""
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def in_sessions(leaders: Sequence[int | None]) -> list[int]:
    """Processes of some sessions that still run; a zombie does not."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) in leaders and fields[0] != "Z":
                    found.append(int(entry.name))
    return found
