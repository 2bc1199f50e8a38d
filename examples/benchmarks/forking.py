"""Starts ranks as forks of a process that has imported what they need: on few cores importing takes longer than a job.

::

    with Preloaded() as preloaded:
        run_ranks(cluster, [python, "-m", "my.module"], start=preloaded.starter(python, ["my.module"], {}))
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from examples.benchmarks import kernel
from examples.benchmarks.host import MARK
from examples.benchmarks.interrupts import undisturbed
from examples.benchmarks.launch import own_environment
from examples.benchmarks.preload import LONGEST_MESSAGE, ROOM
from examples.benchmarks.starting import Process, Start, Starter, anew

_ROOT = Path(__file__).resolve().parents[2]
_IMPORT_PATIENCE_S = 120.0
_FORK_PATIENCE_S = 30.0


class ForkedRank:
    """A rank that a :class:`ForkServer` has started, to be used like :class:`subprocess.Popen`.

    Args:
        server: Whose fork it is.
        pid: Its process id.
    """

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        while self.returncode is None and self._server.hear(0.0):
            pass
        return self.returncode

    def kill(self) -> None:
        """Has it killed; nothing where it has ended."""
        if self.returncode is None:
            self._server.kill(self.pid)

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        while self.returncode is None:
            self._server.hear(None)
        return self.returncode


class ForkServer:
    """A process of :mod:`examples.benchmarks.preload`. It imports by itself; only the first start waits for that.

    Where it cannot import, or has ended, ranks are started anew, and meet the cause in their own place.

    Args:
        python: The interpreter.
        modules: What it imports.
        environment: All of its environment: what libraries read when they are imported must be as in the ranks.
    """

    def __init__(self, python: Path, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._python = str(python)
        self._ranks: dict[int, ForkedRank] = {}
        self._started: ForkedRank | None = None
        self._ready = self._gone = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [self._python, "-m", "examples.benchmarks.preload", str(theirs.fileno()), *modules],
                env={**environment, MARK: ROOM},
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches this process alone
                preexec_fn=partial(kernel.die_with, os.getpid()),
            )

    def start(self, start: Start) -> Process:
        """Starts a rank.

        Args:
            start: Its command must be ``[python, "-m", module, …]`` with this server's interpreter.
        """
        if start.command[:2] != [self._python, "-m"] or len(start.command) < 3:
            raise ValueError(f"{start.command} cannot be forked. Write [{self._python!r}, '-m', module, …].")
        self._wait_until_ready()
        with undisturbed():  # nothing could end a rank that is not known here
            rank = None if self._gone else self._fork(start)
        return rank or anew(start)

    def kill(self, pid: int) -> None:
        """Has a rank killed, unless it has ended."""
        self._ask({"kill": pid})

    def hear(self, patience_s: float | None) -> bool:
        """Waits for one message of the process and takes it in.

        Returns:
            Whether one came. None does once the process has ended, and all its ranks with it.
        """
        if self._gone or not select.select([self._channel], [], [], patience_s)[0]:
            return False
        with undisturbed():
            try:
                message = self._channel.recv(LONGEST_MESSAGE)
            except ConnectionResetError:
                message = b""
            if not message:
                self._end("ended")
                return False
            self._take_in(*json.loads(message))
        return True

    def close(self) -> None:
        """Ends the process, and with it the ranks that still run."""
        if not self._gone:
            self._end("")
        self._channel.close()
        self._log.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _IMPORT_PATIENCE_S
        while not self._ready and not self._gone:
            if not self.hear(max(0.0, deadline - time.monotonic())) and not self._gone:
                self._end(f"was importing for {_IMPORT_PATIENCE_S:g} s")

    def _fork(self, start: Start) -> ForkedRank | None:
        for file in (start.stdout, start.stderr):
            file.write_bytes(b"")  # the fork opens them a little later
        self._started = None
        self._ask({"start": start.to_fields()})
        while self._started is None and not self._gone:
            if not self.hear(_FORK_PATIENCE_S) and not self._gone:
                self._end(f"did not fork within {_FORK_PATIENCE_S:g} s")
        return self._started

    def _ask(self, request: Mapping[str, object]) -> None:
        if self._gone:
            return
        try:
            self._channel.send(json.dumps(request).encode())
        except OSError as error:
            self._end(f"could not be asked ({error})")

    def _take_in(self, event: str, pid: int, status: int) -> None:
        if event == "ready":
            self._ready = True
        elif event == "started":
            self._started = self._ranks[pid] = ForkedRank(self, pid)
        else:
            self._ranks.pop(pid).returncode = status

    def _end(self, why: str) -> None:
        """Sees to it that the process has ended, and tells why where that was not asked for."""
        self._gone = True
        self._process.kill()
        self._process.wait()
        for rank in self._ranks.values():
            rank.returncode = -signal.SIGKILL  # by the kernel, when their parent ended
        self._ranks.clear()
        if why:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip().splitlines()
            print(
                f"note: {self._python} starts each rank anew, since the process to fork them from {why}:",
                *said[-5:],
                sep="\n  ",
                file=sys.stderr,
            )


class Preloaded:
    """A :class:`ForkServer` for each interpreter, made when it is first needed and kept. A context manager."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, ...], ForkServer] = {}

    def __enter__(self) -> Preloaded:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with undisturbed():
            while self._servers:
                self._servers.popitem()[1].close()

    def starter(self, python: Path, modules: Sequence[str], environment: Mapping[str, str]) -> Starter:
        """What starts a rank for :func:`~examples.benchmarks.launch.run_ranks`.

        Args:
            python: The interpreter.
            modules: What it has imported before.
            environment: What all ranks have beside the launcher's own.
        """
        key = (str(python), *modules)
        if key not in self._servers:
            self._servers[key] = ForkServer(python, modules, {**own_environment(), **environment})
        return self._servers[key].start
