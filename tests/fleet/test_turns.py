"""A task has a device whenever it computes, and gives it away at boundaries alone."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from lightning_embrace.fleet.pace import Pace, Progress
from lightning_embrace.fleet.protocol import Ask, Beat, Give, Grant, Recall, Stop
from lightning_embrace.fleet.turns import TaskStopped, Turns


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    """Hears a task, and answers at once or when told to."""

    def __init__(self, answers: bool = True) -> None:
        self.said: list[str] = []
        self.clock = Clock()
        self.pace = Pace(self.clock)
        self.turns = Turns(self.hear, Progress, self.pace, self.clock)
        self.answers = answers
        self.grants = 0

    def hear(self, report: Any) -> None:
        again = f"({'again' if report.again else ''})" if isinstance(report, Give) else ""
        self.said.append(type(report).__name__ + again)
        if self.answers and (isinstance(report, Ask) or (isinstance(report, Give) and report.again)):
            # from another thread, which waits until the task does
            threading.Thread(target=self.grant).start()

    def grant(self) -> None:
        self.grants += 1
        self.turns.hear(Grant(self.grants))

    def recall(self, number: int | None = None) -> None:
        self.turns.hear(Recall(self.grants if number is None else number))


def test_keeps_what_nobody_wants() -> None:
    """A device is asked for once, whatever there is of boundaries and batches."""
    fleet = Fleet()
    for _ in range(3):
        fleet.turns.begin()
        for _ in range(4):
            fleet.turns.boundary()
        fleet.turns.end()
    assert fleet.said == ["Ask"]
    fleet.turns.leave()
    fleet.turns.leave()
    assert fleet.said == ["Ask", "Give()"]


def test_gives_at_the_next_boundary() -> None:
    """Amid a batch a recall is heard at the next boundary, and the task goes on when it is granted again."""
    fleet = Fleet()
    fleet.turns.begin()
    fleet.recall()
    assert fleet.said == ["Ask"]
    fleet.turns.boundary()
    assert fleet.said == ["Ask", "Give(again)"] and fleet.grants == 2
    fleet.turns.boundary()
    assert fleet.said == ["Ask", "Give(again)"]


def test_gives_at_once_between_batches() -> None:
    """While the main thread loads data or saves, and at the end of a batch in which it was recalled."""
    fleet = Fleet()
    fleet.turns.begin()
    fleet.turns.end()
    fleet.recall()
    assert fleet.said == ["Ask", "Give()"]
    fleet.turns.begin()
    fleet.recall()
    fleet.turns.end()
    assert fleet.said == ["Ask", "Give()", "Ask", "Give()"]


def test_a_recall_of_what_was_given() -> None:
    """Crosses what the task has said, and means nothing any more."""
    fleet = Fleet()
    fleet.turns.begin()
    fleet.turns.end()
    fleet.recall()
    fleet.recall()
    fleet.turns.begin()
    fleet.recall(1)
    fleet.turns.boundary()
    assert fleet.said == ["Ask", "Give()", "Ask"]


def test_blocks_that_are_called_between_batches() -> None:
    """They wait for a device, too."""
    fleet = Fleet()
    fleet.turns.boundary()
    assert fleet.said == ["Ask"]
    fleet.recall()
    fleet.turns.end()
    fleet.turns.boundary()
    assert fleet.said == ["Ask", "Give()", "Ask"]


def test_stop_before_anything() -> None:
    """A task that waits for its first device ends at once; one that has begun gets it, and ends its batch."""
    fleet = Fleet(answers=False)
    threading.Timer(0.05, fleet.turns.hear, [Stop()]).start()
    with pytest.raises(TaskStopped):
        fleet.turns.begin()
    begun = Fleet()
    begun.turns.begin()
    begun.turns.end()
    begun.recall()
    begun.turns.hear(Stop())
    begun.turns.begin()
    assert begun.said == ["Ask", "Give()", "Ask"] and begun.turns.stopping


def test_beats() -> None:
    """Once a second at most."""
    fleet = Fleet()
    fleet.turns.begin()
    for _ in range(35):
        fleet.clock.now += 0.1
        fleet.turns.boundary()
    assert fleet.said.count(Beat.__name__) == 3


def test_pace() -> None:
    """What is measured is computing, without waiting; the first batch is not typical."""
    clock = Clock()
    pace = Pace(clock)
    assert pace.remaining(5) == math.inf and pace.unit == 0.0
    for batch in range(3):
        pace.go_on()
        for _ in range(4):
            clock.now += 2.0 if batch == 0 else 0.5
            pace.boundary()
        pace.pause()
        clock.now += 100.0
        pace.go_on()
        pace.pause()
        pace.batch_over()
        clock.now += 50.0
        if batch == 0:
            assert pace.remaining(5) == 40.0
    assert pace.remaining(5) == 10.0 and pace.remaining(math.inf) == math.inf
    assert pace.longest == 2.0 and 0.5 < pace.unit < 2.0
