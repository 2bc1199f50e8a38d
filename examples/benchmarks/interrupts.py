"""Turns signals that end a process into exceptions, and holds them off while something must be finished."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class SignalsRaise:
    """From :meth:`start` to :meth:`stop`, SIGTERM and SIGHUP raise SystemExit, so that ``with`` and ``finally`` run.

    Only where nobody else has taken the signal, and only in the main thread, where Python allows it.
    """

    def __init__(self) -> None:
        self._taken: list[signal.Signals] = []

    def start(self) -> None:
        """Takes the signals."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, _leave)
                    self._taken.append(number)

    def stop(self) -> None:
        """Gives them back."""
        while self._taken:
            signal.signal(self._taken.pop(), signal.SIG_DFL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Holds off Ctrl-C, SIGTERM and SIGHUP until the block has ended; what came meanwhile acts then."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals act in the main thread
        return
    came: list[int] = []
    handlers: dict[signal.Signals, Any] = {
        number: signal.signal(number, lambda n, _: came.append(n))
        for number in _ENDING
        if signal.getsignal(number) is not None  # set from outside Python, and not to be put back from here
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received in came[:1]:
            signal.raise_signal(received)
