"""How a fleet is shown."""

from __future__ import annotations

import io
import math
from dataclasses import replace

from rich.console import Console

from lightning_embrace.fleet.board import Board, DeviceRow, TaskRow
from lightning_embrace.fleet.display import Lines, TerminalTable, Watch, display_for, render

ROW = TaskRow("lr=0.1", "running", "on cpu:0", 12, 2.34567, 0.25, 61.2, "")
BOARD = Board(
    (ROW, TaskRow("b", "running", "starts", None, None, 0.0, math.inf, ""), replace(ROW, name="c", remaining=None)),
    (DeviceRow("cpu:0", "lr=0.1", 0.125), DeviceRow("cpu:1", None, 1.0)),
    5.0,
)


def shown(*boards: Board, lines: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=not lines, width=100)
    display = Lines(console) if lines else TerminalTable(console)
    for board in boards:
        display.show(board)
    display.close()
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_table() -> None:
    """Every task and device has a row."""
    console = Console(file=io.StringIO(), width=100)
    console.print(render(BOARD))
    words = [line.replace("│", " ").split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["lr=0.1", "on", "cpu:0", "12", "2.346", "25%", "0:01:01"] in words
    assert ["b", "starts", "0%", "?"] in words and ["c", "on", "cpu:0", "12", "2.346", "25%"] in words
    assert ["cpu:0", "lr=0.1", "12%"] in words and ["cpu:1", "100%"] in words


def test_terminal() -> None:
    """The last board stays."""
    later = replace(BOARD, tasks=(replace(ROW, step=13),))
    assert " 13 " in shown(BOARD, later, lines=False).rpartition("HydraFleet")[2]


def test_lines() -> None:
    """A line for each change, and in each minute one for each task at work; as they are, with brackets."""
    done = replace(ROW, state="failed", now="failed", note="E: [b]no[/b] in a long line " + "x" * 100)
    changed = replace(BOARD, tasks=(done, *BOARD.tasks[1:]), seconds=10.0)
    minute = replace(changed, seconds=61.0)
    lines = shown(BOARD, BOARD, changed, minute, replace(minute, seconds=62.0), lines=True).splitlines()
    assert lines == [
        f"[0:00:10] lr=0.1: failed, {done.note}",
        "[0:01:01] b: starts, 0% of device time",
        "[0:01:01] c: on cpu:0, 25% of device time, step 12, loss 2.346",
        "[0:01:02] idle: cpu:0 12%, cpu:1 100%",
    ]


def test_where() -> None:
    """Tables are for terminals, where they are wanted."""
    terminal, file = Console(file=io.StringIO(), force_terminal=True), Console(file=io.StringIO())
    assert isinstance(display_for(True, terminal), TerminalTable)
    assert isinstance(display_for(False, terminal), Lines) and isinstance(display_for(True, file), Lines)


def test_watch() -> None:
    """Boards are made four times a second, and at the end."""
    now, made = [0.0], []

    class Nowhere:
        def show(self, board: Board) -> None:
            made.append(board.seconds)

        def close(self) -> None:
            made.append(math.inf)

    watch = Watch(lambda seconds: replace(BOARD, seconds=seconds), Nowhere(), clock=lambda: now[0])
    for now[0] in (0.0, 0.1, 0.2, 0.25, 0.4, 0.6):
        watch.look()
    watch.close()
    assert made == [0.0, 0.25, 0.6, 0.6, math.inf]
