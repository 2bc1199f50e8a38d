"""The process that ranks are forked from: it imports what they need once, and starts them when it is asked to.

``python -m examples.benchmarks.preload SOCKET MODULE…`` is run by :mod:`examples.benchmarks.forking`, which holds the
other end of the socket. It asks ``{"start": …}`` or ``{"kill": pid}`` and is told ``[event, pid, exit status]``. A fork
takes its files, environment, folder and namespace first, then runs the ``main`` of a module, as ``python -m`` would.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from examples.benchmarks import kernel, resident
from examples.benchmarks.host import MARK
from examples.benchmarks.starting import Start

#: what the mark must be set to when this is started: the room for the names of clusters
ROOM = "-" * 64
LONGEST_MESSAGE = 1 << 20


class Mark:
    """The cluster that /proc/PID/environ says this process belongs to, and each fork from its first instant.

    The kernel shows there the memory that it filled at the start. What ``os.environ`` is given later lies elsewhere, so
    the name is written where the first one stood.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        self._address = libc.getenv(MARK.encode())
        if os.environ.get(MARK) != ROOM or self._address is None:
            raise RuntimeError(f"{MARK} is {os.environ.get(MARK)!r}. Start this with {ROOM!r}.")

    def write(self, name: str) -> None:
        """Replaces the name."""
        if len(name) > len(ROOM):
            raise ValueError(f"{name!r} is longer than {len(ROOM)} characters.")
        ctypes.memmove(self._address, name.encode().ljust(len(ROOM), b"\0"), len(ROOM))


class Server:
    """Starts ranks as forks of this process and tells how they ended.

    Args:
        channel: Where requests come from.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._mark = Mark()
        self._pages = resident.file_pages()
        self._running: dict[int, int] = {}  # process ids by what becomes readable when the process ends
        self._say("ready", os.getpid())

    def serve(self) -> None:
        """Until the other end is closed."""
        while True:
            asked = self._channel.fileno()
            ready, _, _ = select.select([asked, *self._running], [], [])
            for ended in self._running.keys() & ready:
                self._reap(ended)
            if asked in ready:
                message = self._channel.recv(LONGEST_MESSAGE)
                if not message:
                    return
                self._obey(json.loads(message))

    def _obey(self, request: dict[str, Any]) -> None:
        if "start" in request:
            self._fork(Start.from_fields(request["start"]))
        elif request["kill"] in self._running.values():  # not reaped, so the number is still its own
            os.kill(request["kill"], signal.SIGKILL)

    def _fork(self, start: Start) -> None:
        self._mark.write(start.environment.get(MARK, ""))
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            self._become(start, parent)
        self._mark.write("")
        self._running[os.pidfd_open(pid)] = pid
        self._say("started", pid)

    def _reap(self, ended: int) -> None:
        pid = self._running.pop(ended)
        os.close(ended)
        self._say("ended", pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def _say(self, event: str, pid: int, status: int = 0) -> None:
        self._channel.send(json.dumps([event, pid, status]).encode())

    def _become(self, start: Start, parent: int) -> NoReturn:
        status = 1
        try:
            kernel.die_with(parent)
            os.setsid()
            self._channel.close()  # or the other end would not notice the end of this process' parent
            for readable in self._running:
                os.close(readable)
            _take_place(start)
            resident.touch(self._pages)
            module, *arguments = start.command[2:]
            sys.argv[:] = [module, *arguments]
            import_module(module).main()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _take_place(start: Start) -> None:
    """Makes a rank of this process, all but what it runs."""
    for number, file in ((1, start.stdout), (2, start.stderr)):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(start.environment)
    if start.cwd is not None:
        os.chdir(start.cwd)
    if start.namespace is not None:
        kernel.enter_network(start.namespace)


def _preload(modules: Sequence[str]) -> None:
    for module in modules:
        try:
            import_module(module)
        except BaseException:  # the ranks meet it again, and say so in their own place
            traceback.print_exc()
    sys.stdout.flush()  # what is still in it would be printed by every fork
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        sys.exit(f"{threads} threads run after importing {', '.join(modules)}: a fork would have one of them.")


def main() -> None:
    """Imports, then serves."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    _preload(sys.argv[2:])
    Server(channel).serve()


if __name__ == "__main__":
    main()
