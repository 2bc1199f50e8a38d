"""SIGTERM, kept until all ranks can take it at the same point of the same step."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any


class Sigterm:
    """Stands before the handler that Lightning has set for SIGTERM, and calls it when told to.

    That handler makes all ranks join a broadcast at once, wherever each of them is: between two collectives of which
    the others have begun one, or twice where a signal to the whole process group comes on top of the one that the
    parent passes on. Either never ends.
    """

    def __init__(self) -> None:
        #: whether a signal has arrived
        self.heard = False
        self._handler: Any = None

    def take_over(self) -> None:
        """Call it once Lightning has set its handlers; Lightning puts back what was there before them by itself."""
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self.heard, self._handler = False, handler
            signal.signal(signal.SIGTERM, self._hear)

    def deliver(self) -> None:
        """Calls Lightning's handler, and those that were set before it, once. Collective."""
        handler, self._handler = self._handler, None
        if handler is not None:
            handler(signal.SIGTERM, sys._getframe())

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True
