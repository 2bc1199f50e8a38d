"""A task's side of the leases: when it waits for a device, and when it gives it away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from lightning_embrace.fleet.pace import Pace, Progress
from lightning_embrace.fleet.protocol import Ask, Beat, Command, Give, Grant, Recall, Report, Stop

#: seconds between two signs of life
_BEAT = 1.0


class TaskStopped(BaseException):
    """The fleet ends; the task has saved what it goes on from. Like KeyboardInterrupt, it is no error of anybody's."""


class TaskPaused(BaseException):
    """The task has saved and ends for a while.

    Args:
        score: The metric that was wanted.
        metrics: What was logged last.
    """

    def __init__(self, score: float, metrics: dict[str, float]) -> None:
        super().__init__()
        self.score, self.metrics = score, metrics


class Turns:
    """Has a device while a task computes.

    Amid a batch it is given away at boundaries alone; between batches at once, by the thread that listens to the fleet.
    Nothing is given away unless the fleet asks for it.

    Args:
        send: Tells the fleet.
        progress: How far the task is.
        pace: What is measured.
        clock: Gives seconds.
    """

    def __init__(
        self,
        send: Callable[[Report], None],
        progress: Callable[[], Progress],
        pace: Pace,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._send = send
        self._progress = progress
        self._pace = pace
        self._clock = clock
        self._changed = threading.Condition()
        self._grant: int | None = None
        self._recalled = False
        self._inside = False
        self._has_begun = False
        self._last_beat = clock()
        #: the task is to save and to end
        self.stopping = False

    # ---- the thread that trains --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A batch begins: waits for a device.

        Raises:
            TaskStopped: The fleet ends, and this is the first batch: there is nothing to save.
        """
        with self._changed:
            self._inside = True
            if self._grant is None:
                self._send(Ask(self._progress()))
                self._wait()
            self._has_begun = True
            self._pace.go_on()

    def boundary(self) -> None:
        """A shard is about to compute."""
        if not self._inside:
            self.begin()  # blocks that are called between batches
            return
        self._pace.boundary()
        if self._recalled:  # without the lock: it may be seen at the next boundary as well
            with self._changed:
                self._pace.pause()
                self._give(again=True)
                self._wait()
                self._pace.go_on()
        self._beat()

    def pause(self) -> None:
        """Computing is over; what is measured may be read."""
        self._pace.pause()

    def leave(self) -> None:
        """Training is over: gives away what it has, asked or not."""
        with self._changed:
            self._inside = False
            if self._grant is not None:
                self._give(again=False)

    def end(self) -> None:
        """A batch is over."""
        with self._changed:
            self._pace.pause()
            self._inside = False
            if self._recalled:
                self._give(again=False)
        self._beat()

    def _wait(self) -> None:
        while self._grant is None:
            if self.stopping and not self._has_begun:
                raise TaskStopped
            self._changed.wait()

    def _give(self, again: bool) -> None:
        self._grant, self._recalled = None, False
        self._send(Give(self._progress(), again))

    def _beat(self) -> None:
        now = self._clock()
        if now - self._last_beat >= _BEAT:
            self._last_beat = now
            self._send(Beat(self._progress()))

    # ---- the thread that listens -------------------------------------------------------------------------------------

    def hear(self, command: Command) -> None:
        """Does what the fleet says."""
        with self._changed:
            if isinstance(command, Grant):
                self._grant = command.number
            elif isinstance(command, Recall):
                self._recalled = command.number == self._grant
                if self._recalled and not self._inside:
                    self._give(again=False)
            elif isinstance(command, Stop):
                self.stopping = True
            self._changed.notify_all()
