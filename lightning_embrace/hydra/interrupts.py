"""Signals that would end a run within a step, kept until the step is whole."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Ctrl-C, what a scheduler sends, and what Lightning's SLURM environment saves on
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))


class Interrupts:
    """Stands before the handlers of signals while an optimizer steps."""

    def __init__(self) -> None:
        self._heard: dict[int, Callable[[int, FrameType | None], Any]] = {}

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a signal is kept. One that comes again is not: somebody does not want to wait."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python runs handlers in the main thread alone
            return
        handlers = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}

        def hear(number: int, frame: FrameType | None) -> None:
            if number in self._heard:
                handlers[number](number, frame)
            self._heard[number] = handlers[number]

        for number in handlers:
            signal.signal(number, hear)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                if signal.getsignal(number) is hear:
                    signal.signal(number, handler)

    def deliver(self) -> None:
        """Calls the handlers of what was kept: a batch is over, with all that follows a step."""
        heard, self._heard = self._heard, {}
        for number, handler in heard.items():
            handler(number, sys._getframe())

    def forget(self) -> None:
        """The run is over."""
        self._heard.clear()
