"""One rank comes to harm while gradients of the step before are still on their way, or in the thread that sends them.

Nobody kills the others here; they end by themselves, as in `test_ranks_distributed`.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_embrace.monitor import chrome
from tests.faults.test_launchers_distributed import ENDLESS
from tests.faults.test_ranks_distributed import DIED, check_survivor
from tests.faults.victim import Harm, fit
from tests.faults.world import Script, World
from tests.monitor import schema

STEP = 4


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def start(world_size: int, harm: Harm, **options: Any) -> World:
        folder = tmp_path / str(len(worlds))
        folder.mkdir()
        worlds.append(
            World(
                folder, world_size, functools.partial(fit, harm, world_size, late=True, **{"alone": False, **options})
            )
        )
        return worlds[-1]

    yield start
    for world in worlds:
        world.clear()


@pytest.mark.parametrize(
    ("world_size", "point", "rank"),
    [
        (3, "batch_end", 1),
        (2, "before_lookup", 0),
        (3, "backward", 2),
        (3, "exchange=delayed gradient rows", 1),
        (3, "exchange=early rows", 0),
        (2, "exchange=gradients of block", 1),
    ],
)
def test_killed(start: Callable[..., World], world_size: int, point: str, rank: int) -> None:
    """kill -9 with updates pending, and as the queue's thread puts them on the wire."""
    ends = start(world_size, Harm(point, "kill", rank, STEP)).ends()
    for other, end in enumerate(ends):
        if other == rank:
            assert end.code == -signal.SIGKILL
        else:
            check_survivor(end, f"rank {rank} died {DIED}")


@pytest.mark.parametrize(
    ("world_size", "point", "rank"),
    [
        (3, "batch_end", 0),
        (2, "before_lookup", 1),
        (3, "loader", 1),
        (2, "loader", 0),
        (3, "validation", 2),
        (3, "exchange=early rows", 1),
    ],
)
def test_raised(start: Callable[..., World], world_size: int, point: str, rank: int) -> None:
    """With updates pending; a loader raises one batch before that batch is trained on, and on one rank only."""
    ends = start(world_size, Harm(point, "raise", rank, STEP)).ends()
    for other, end in enumerate(ends):
        if other == rank:
            assert (end.code, end.last_line) == (1, f"ValueError: harm at {point}"), end.output
        else:
            check_survivor(end, f"rank {rank} failed ")
            assert end.last_line.endswith(f": ValueError: harm at {point}")


@pytest.mark.parametrize(
    ("exchange", "rank", "alone"),
    [
        ("delayed gradient rows", 1, False),
        ("delayed gradient rows", 1, True),
        ("gradients of block", 0, False),
        ("gradients of block", 1, True),
    ],
)
def test_raised_in_the_queues_thread(start: Callable[..., World], exchange: str, rank: int, alone: bool) -> None:
    """All hear of it at once, whatever their main threads wait for.

    ``alone``: rank 0 looks something up that waits for the exchange; rank 1's main thread waits for rank 0 to begin the
    next step, and knew nothing of what had happened in its own process until that wait ran out of time.
    """
    ends = start(2, Harm(f"exchange={exchange}", "raise", rank, STEP), alone=alone).ends(patience=60.0)
    for other, end in enumerate(ends):
        assert end.code == 1, end.output
        error = f"The exchange '{exchange}"
        if other == rank:
            assert end.last_line.startswith(f"lightning_embrace.comm.torch_backend.ExchangeError: {error}"), end.output
        else:
            check_survivor(end, f"rank {rank} failed ")
        assert error in end.last_line and f"ValueError: harm at exchange={exchange}" in end.last_line, end.output


def test_stopped(start: Callable[..., World]) -> None:
    """SIGSTOP with updates pending, and in the queue's thread: after ``timeout`` the others name the exchange."""
    harms = [Harm("batch_end", "stop", 1, STEP), Harm("exchange=delayed gradient rows", "stop", 0, STEP)]
    worlds = [start(2, harm, timeout=4.0) for harm in harms]
    for harm, world in zip(harms, worlds):
        (end,) = world.ends([1 - harm.rank])
        assert end.code == 1, end.output
        assert "Timed out" in end.last_line and "The exchange " in end.last_line, end.output


@pytest.mark.parametrize(("point", "kind"), [("before_lookup", "raise"), ("exchange=delayed gradient rows", "raise")])
def test_each_survivor_leaves_its_part_of_the_trace(
    start: Callable[..., World], tmp_path: Path, point: str, kind: str
) -> None:
    """The file opens; no process aborts because an exchange's end was to be recorded while it was ending itself."""
    path = tmp_path / "trace.json"
    ends = start(2, Harm(point, kind, 1, STEP), trace=str(path)).ends()
    assert [end.code for end in ends] == [1, 1], ends[0].output + ends[1].output
    assert not path.exists()
    for rank in range(2):
        trace = chrome.read(tmp_path / f"trace.rank{rank}.json")
        schema.check(trace)
        assert "forward" in {event["name"] for event in trace["traceEvents"]}


def test_interrupted(tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches all processes at once: nothing is left of them but their traces."""
    script = Script(tmp_path, "--late", "--trace", str(tmp_path / "trace.json"), *ENDLESS)
    try:
        script.await_training(2)
        os.killpg(script.process.pid, signal.SIGINT)
        end = script.end()
        assert script.left() == []
        assert end.code == 1, end.output
        assert "terminate called" not in end.output and "Fatal Python error" not in end.output, end.output
        for rank in range(2):
            schema.check(chrome.read(tmp_path / f"trace.rank{rank}.json"))
    finally:
        script.clear()
