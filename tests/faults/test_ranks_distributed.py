"""One rank comes to harm: every other rank ends with an error that names it, wherever the harm was done.

Nobody kills the others here, as torchrun and Lightning's observer do; they end by themselves.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.victim import Harm, fit
from tests.faults.world import End, World

DIED = "(its process ended without a word) while this rank was"
IN_STEP = ("before_lookup", "between_lookups", "after_lookup", "backward")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def start(world_size: int, harm: Harm, **options: Any) -> World:
        folder = tmp_path / str(len(worlds))
        folder.mkdir()
        worlds.append(World(folder, world_size, functools.partial(fit, harm, world_size, **options)))
        return worlds[-1]

    yield start
    for world in worlds:
        world.clear()


def check_survivor(end: End, message: str) -> None:
    """It ended with the message, which was on stderr before anything was raised."""
    assert end.code == 1, end.output
    assert end.last_line.startswith(f"lightning_embrace.comm.control.RankFailedError: {message}"), end.output
    note = next((n for n in end.notes() if message in n), None)
    assert note is not None, end.output
    assert end.output.index(note) < end.output.index("Traceback"), end.output


@pytest.mark.parametrize(
    ("world_size", "point", "rank"),
    [
        (3, "setup", 1),
        (2, "configure_model", 0),
        (3, "exchange=initial weights", 1),
        (3, "configure_optimizers", 0),
        (3, "before_lookup", 0),
        (2, "before_lookup", 1),
        (3, "between_lookups", 1),
        (3, "after_lookup", 0),
        (3, "backward", 1),
        (3, "exchange=gradient rows", 2),
        (3, "before_optimizer", 0),
        (2, "after_optimizer", 1),
        (3, "batch_end", 1),
        (3, "validation", 0),
        (3, "validation", 2),
        (3, "exchange=state of tags", 0),
    ],
)
def test_killed(start: Callable[..., World], world_size: int, point: str, rank: int) -> None:
    """kill -9, at the points between which ranks wait for each other in different ways."""
    ends = start(world_size, Harm(point, "kill", rank)).ends()
    for other, end in enumerate(ends):
        if other == rank:
            assert end.code == -signal.SIGKILL
            continue
        check_survivor(end, f"rank {rank} died {DIED}")
        if point in IN_STEP:
            assert f"{DIED} at step 2, in or after exchange " in end.last_line


@pytest.mark.parametrize(
    ("world_size", "point", "rank"),
    [
        (3, "setup", 0),
        (3, "configure_model", 1),
        (2, "configure_optimizers", 1),
        (3, "loader", 0),
        (3, "before_lookup", 1),
        (2, "between_lookups", 0),
        (3, "after_lookup", 2),
        (3, "backward", 0),
        (3, "before_optimizer", 1),
        (3, "batch_end", 0),
        (3, "validation", 1),
        (2, "train_end", 0),
        (3, "exchange=state of words", 1),
    ],
)
def test_raised(start: Callable[..., World], world_size: int, point: str, rank: int) -> None:
    """The user's code raises on one rank: it ends with its own error, the others with its words."""
    ends = start(world_size, Harm(point, "raise", rank)).ends()
    for other, end in enumerate(ends):
        if other == rank:
            assert (end.code, end.last_line) == (1, f"ValueError: harm at {point}"), end.output
            continue
        check_survivor(end, f"rank {rank} failed ")
        assert end.last_line.endswith(f": ValueError: harm at {point}")
        if point in IN_STEP:
            assert f"rank {rank} failed at step 2, in or after exchange " in end.last_line


@pytest.mark.parametrize(
    ("point", "rank"),
    [("setup", 0), ("configure_model", 1), ("after_lookup", 1), ("batch_end", 0), ("validation", 0)],
)
def test_raised_and_stayed(start: Callable[..., World], point: str, rank: int) -> None:
    """A script that catches the error keeps its process, and with it every connection: nothing breaks by itself.

    ``batch_end``: the others are in Lightning's own broadcast then, where only a broken connection reaches them.
    """
    world = start(3, Harm(point, "stay", rank))
    for end in world.ends([r for r in range(3) if r != rank]):
        check_survivor(end, f"rank {rank} failed ")


@pytest.mark.parametrize("rank", [0, 1])
def test_id_out_of_range_in_a_training_step(start: Callable[..., World], rank: int) -> None:
    """On one rank only; the IndexError comes on all."""
    for end in start(3, Harm("before_lookup", "bad_id", rank)).ends():
        assert end.code == 1
        assert end.last_line.startswith(
            f"IndexError: Rank {rank} looked up id 47 in table 'words', whose ids range from 0 to 39."
        ), end.output


def test_id_out_of_range_in_validation(start: Callable[..., World]) -> None:
    """No look-up is common there: the others hear of it as of any error."""
    ends = start(3, Harm("validation", "bad_id", 1)).ends()
    error = "IndexError: Rank 1 looked up id -3 in table 'words', whose ids range from 0 to 39."
    assert ends[1].last_line.startswith(error), ends[1].output
    for end in (ends[0], ends[2]):
        check_survivor(end, "rank 1 failed ")
        assert error in end.last_line


def test_stopped(start: Callable[..., World]) -> None:
    """SIGSTOP looks like slowness to everybody; after ``timeout`` the others end and name the exchange."""
    harms = [
        (Harm("between_lookups", "stop", 1), "header of round "),
        # the closing header of step 2, or before it the ids of the next step
        (Harm("backward", "stop", 1), "step"),
        (Harm("validation", "stop", 2), "look-up in table "),
        (Harm("exchange=state of words", "stop", 0), "state of words"),
    ]
    worlds = [start(3, harm, timeout=4.0) for harm, _ in harms]
    for (harm, exchange), world in zip(harms, worlds):
        for end in world.ends([r for r in range(3) if r != harm.rank]):
            assert end.code == 1, end.output
            assert exchange in end.last_line.partition(" (at step")[0], end.output
            assert "Timed out" in end.last_line, end.output
            assert "takes longer than `timeout`" in end.output


def test_slow(start: Callable[..., World]) -> None:
    """A rank that sleeps for 5 s in the middle is waited for, by a look-up outside training steps too.

    Such a look-up broke once when it took longer than half a second: gloo closes all connections of a group when a wait
    for one message runs out of time, and the waits were cut into slices.
    """
    points = ("between_lookups", "before_optimizer", "validation")
    for world in [start(3, Harm(point, "sleep", 1)) for point in points]:
        for end in world.ends():
            assert (end.code, end.last_line) == (0, "returned"), end.output
            assert end.notes() == []
