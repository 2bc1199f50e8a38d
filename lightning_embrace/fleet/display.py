"""Shows how a fleet stands: as a table that changes, in a terminal or a notebook, or as lines."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from lightning_embrace.fleet.board import Board, TaskRow

#: seconds between two looks
_LOOK = 0.25
#: seconds between two rounds of lines of tasks at work
_ROUND = 60.0


class Display(Protocol):
    """Where a board is seen."""

    def show(self, board: Board) -> None:
        """In the place of the one before, or below it."""

    def close(self) -> None:
        """It has been shown for the last time."""


class Watch:
    """Shows a board now and then.

    Args:
        board: Makes it, given the time.
        display: Shows it.
        clock: Gives seconds.
    """

    def __init__(self, board: Callable[[float], Board], display: Display, clock: Callable[[], float] = monotonic):
        self._board = board
        self._display = display
        self._clock = clock
        self._next = -math.inf

    def look(self) -> None:
        """Call it as often as you like."""
        if (now := self._clock()) >= self._next:
            self._next = now + _LOOK
            self._display.show(self._board(now))

    def close(self) -> None:
        """The end is shown as well."""
        self._display.show(self._board(self._clock()))
        self._display.close()


def display_for(wanted: bool, console: Console | None = None) -> Display:
    """A table where there is a terminal or a notebook, and lines elsewhere.

    Args:
        wanted: False: lines everywhere.
        console: Of rich; None: standard output.
    """
    console = console or Console()
    if wanted and console.is_jupyter:
        with suppress(ImportError):
            return NotebookTable()
    return TerminalTable(console) if wanted and console.is_terminal else Lines(console)


class TerminalTable:
    """A table that stays where it is.

    Args:
        console: Of rich.
    """

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)

    def show(self, board: Board) -> None:
        """See :class:`Display`."""
        self._live.start()
        self._live.update(render(board), refresh=True)

    def close(self) -> None:
        """See :class:`Display`."""
        self._live.stop()


class NotebookTable:
    """A cell's output that is replaced. It needs nothing that the notebook does not have."""

    def __init__(self) -> None:
        from IPython import display

        show: Any = display.display
        self._handle: Any = show("", display_id=True)

    def show(self, board: Board) -> None:
        """See :class:`Display`."""
        self._handle.update(render(board))  # rich's tables are shown as such

    def close(self) -> None:
        """See :class:`Display`."""


class Lines:
    """A line when a task begins or ends, and now and then one for each that is at work.

    Args:
        console: Of rich.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[str, str] = {}
        self._next = _ROUND
        self._last: Board | None = None

    def show(self, board: Board) -> None:
        """See :class:`Display`."""
        before, self._states = self._states, {row.name: row.state for row in board.tasks}
        if before:
            for row in board.tasks:
                if row.state != before[row.name]:
                    self._say(board, f"{row.name}: {row.state}" + (f", {row.note}" if row.note else ""))
        if board.seconds >= self._next:
            self._next = board.seconds + _ROUND
            for row in board.tasks:
                if row.state == "running":
                    self._say(board, f"{row.name}: {_at_work(row)}")
        self._last = board

    def close(self) -> None:
        """See :class:`Display`."""
        if self._last is not None:
            idle = ", ".join(f"{device.name} {device.idle:.0%}" for device in self._last.devices)
            self._say(self._last, f"idle: {idle}")

    def _say(self, board: Board, text: str) -> None:
        line = f"[{duration(board.seconds)}] {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _at_work(row: TaskRow) -> str:
    parts = [row.now, f"{row.share:.0%} of device time"]
    if row.step is not None:
        parts.append(f"step {row.step}")
    if row.loss is not None:
        parts.append(f"loss {row.loss:.4g}")
    if row.remaining is not None and math.isfinite(row.remaining):
        parts.append(f"{duration(row.remaining)} to compute")
    return ", ".join(parts)


def render(board: Board) -> Table:
    """Draws tasks and devices.

    Args:
        board: How the fleet stands.
    """
    tasks = Table(title=f"HydraFleet  {duration(board.seconds)}", title_justify="left")
    for name, side in (("task", "left"), ("", "left"), *((n, "right") for n in _NUMBERS)):
        tasks.add_column(name, justify=side, no_wrap=name != "task")  # type: ignore[arg-type]
    for row in board.tasks:
        tasks.add_row(
            row.name,
            row.now,
            "" if row.step is None else str(row.step),
            "" if row.loss is None else f"{row.loss:.4g}",
            f"{row.share:.0%}",
            "" if row.remaining is None else "?" if math.isinf(row.remaining) else duration(row.remaining),
        )
    devices = Table()
    devices.add_column("device")
    devices.add_column("task")
    devices.add_column("idle", justify="right")
    for device in board.devices:
        devices.add_row(device.name, device.task or "", f"{device.idle:.0%}")
    both = Table.grid()
    both.add_row(tasks)
    both.add_row(devices)
    return both


_NUMBERS = ("step", "loss", "device time", "to compute")


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    Args:
        seconds: Finite.
    """
    return str(timedelta(seconds=round(seconds)))
