"""Tasks as processes of this machine, and pipes to them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Pipe, wait
from typing import Any

from lightning_embrace.fleet.carrier import Gone
from lightning_embrace.fleet.layout import LOG
from lightning_embrace.fleet.protocol import Command, Order, Report

_MODULE = "lightning_embrace.fleet.worker"
#: seconds between two looks at processes, where the system does not tell of their ends
_LOOK = 0.1


class _Process:
    """A task's process and the socket to it.

    Args:
        order: What it is to do.
        device: Where it may compute, such as ``"cuda:1"``; None: on the CPU.
    """

    def __init__(self, order: Order, device: str | None) -> None:
        self.connection, theirs = Pipe()
        with tempfile.TemporaryFile() as orders, open(order.folder / LOG, "ab") as log:
            pickle.dump(order, orders)
            orders.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), str(os.getpid())],
                stdin=orders,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the fleet
                env=_environment(order, device),
            )
        theirs.close()
        self.pid = self._process.pid
        #: becomes readable at its end. The socket does not, while a process that it has started has it too
        self.end = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None

    def has_ended(self) -> bool:
        """Whether it is a zombie: nobody else has its number yet."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # the program lets the system wait for its children
            return True

    def kill(self) -> None:
        """Ends it, and what it has started; before it was waited for."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def heard(self) -> list[Report]:
        """What it has said and nobody has read."""
        messages: list[Report] = []
        try:
            while not self.connection.closed and self.connection.poll():
                messages.append(self.connection.recv())
        except (EOFError, OSError):
            self.connection.close()
            self.kill()  # nobody hears it any more
        return messages

    def bury(self) -> str:
        """Waits for it.

        Returns:
            How it ended.
        """
        code = self._process.wait()
        self.connection.close()
        if self.end is not None:
            os.close(self.end)
        if code >= 0:
            return f"its process ended with code {code}"
        name = signal.Signals(-code).name
        memory = " (the kernel sends it where memory runs out)" if -code == signal.SIGKILL else ""
        return f"its process was ended by {name}{memory}"


class ProcessCarrier:
    """See :class:`~lightning_embrace.fleet.carrier.Carrier`."""

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}

    def start(self, order: Order, device: str | None) -> None:
        """See :class:`~lightning_embrace.fleet.carrier.Carrier`."""
        self._processes[order.name] = _Process(order, device)

    def send(self, name: str, command: Command) -> None:
        """See :class:`~lightning_embrace.fleet.carrier.Carrier`."""
        with suppress(OSError):  # it is gone, and `wait` will say so
            self._processes[name].connection.send(command)

    def kill(self, name: str) -> None:
        """See :class:`~lightning_embrace.fleet.carrier.Carrier`."""
        self._processes[name].kill()

    def wait(self, seconds: float) -> list[tuple[str, Report | Gone]]:
        """See :class:`~lightning_embrace.fleet.carrier.Carrier`."""
        sources: list[Any] = [p.connection for p in self._processes.values() if not p.connection.closed]
        ends = [p.end for p in self._processes.values() if p.end is not None]
        wait([*sources, *ends], seconds if len(ends) == len(self._processes) else min(seconds, _LOOK))
        events: list[tuple[str, Report | Gone]] = []
        for name, process in list(self._processes.items()):
            ended = process.has_ended()
            if ended:
                process.kill()  # what it has started and left, before its number may be another's
            events += [(name, message) for message in process.heard()]
            if ended:
                events.append((name, Gone(self._processes.pop(name).bury())))
        return events

    def close(self) -> None:
        """See :class:`~lightning_embrace.fleet.carrier.Carrier`."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.bury()
        self._processes.clear()


def _environment(order: Order, device: str | None) -> dict[str, str]:
    """The fleet's, with what concerns its place and its device; it imports what the fleet can."""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    found |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": str(order.threads)}
    if device is not None:
        seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        index = int(device.rpartition(":")[2])
        found["CUDA_VISIBLE_DEVICES"] = seen[index] if seen else str(index)
    return found
