"""A task's process: ``python -m lightning_embrace.fleet.worker HANDLE``, with the order on standard input."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from lightning_embrace.fleet.protocol import Command, Order
from lightning_embrace.fleet.training import Training

_PR_SET_PDEATHSIG = 1


def main(handle: int, parent: int) -> None:
    """Trains what standard input says.

    Args:
        handle: The open socket to the fleet.
        parent: The fleet's process: this one ends with it.
    """
    _die_with(parent)
    order: Order = pickle.load(sys.stdin.buffer)
    channel: Connection = Connection(handle)
    sending = threading.Lock()

    def send(message: object) -> None:
        with sending:
            channel.send(message)

    training = Training(order, send)
    threading.Thread(target=_listen, args=(channel, training.hear), name="fleet", daemon=True).start()
    send(training.run())


def _listen(channel: Connection, hear: Callable[[Command], None]) -> None:
    try:
        while True:
            hear(channel.recv())
    except (EOFError, OSError):  # there is no fleet any more: nobody would grant anything
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _die_with(parent: int) -> None:
    """Linux: also where this process hangs, and no thread of it can notice anything."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        raise SystemExit("the fleet was gone before its task began")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
