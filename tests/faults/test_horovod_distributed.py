"""One rank comes to harm while Horovod carries the exchanges: the others end as they do with torch, and in time."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_ranks_distributed import DIED, check_survivor
from tests.faults.victim import Harm, fit
from tests.faults.world import End, Script, World

pytestmark = pytest.mark.horovod
N = 3
#: how often each test runs whose ranks are forked; `make faults` runs them twenty times and keeps the counts
TIMES = range(int(os.environ.get("REPEAT", "1")))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def start(harm: Harm, **options: Any) -> World:
        folder = tmp_path / str(len(worlds))
        folder.mkdir()
        function = functools.partial(fit, harm, N, communication="horovod", **options)
        worlds.append(World(folder, N, function))
        return worlds[-1]

    yield start
    for world in worlds:
        world.clear()


@pytest.mark.parametrize("_", TIMES)
@pytest.mark.parametrize(
    ("point", "rank"),
    [("setup", 1), ("exchange=start of Horovod", 1), ("between_lookups", 0), ("backward", 1), ("validation", 2)],
)
def test_killed(start: Callable[..., World], point: str, rank: int, _: int) -> None:
    """kill -9. None waits for the timeout of ten minutes: neither in an exchange nor when its process ends."""
    for other, end in enumerate(start(Harm(point, "kill", rank)).ends()):
        if other == rank:
            assert end.code == -signal.SIGKILL
        else:
            check_survivor(end, f"rank {rank} died {DIED}")


@pytest.mark.parametrize("nth", TIMES)
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_in_the_start(start: Callable[..., World], rank: int, nth: int) -> None:
    """While the ranks connect Horovod, each time some milliseconds later: its thread throws, which would abort."""
    harm = Harm("start_of_horovod", "kill", rank, seconds=0.005 * ((nth + 6) % 20))
    for other, end in enumerate(start(harm).ends()):
        if other == rank:
            assert end.code == -signal.SIGKILL
        else:
            check_survivor(end, f"rank {rank} died {DIED}")


@pytest.mark.parametrize("_", TIMES)
@pytest.mark.parametrize(("point", "rank"), [("after_lookup", 1), ("backward", 0)])
def test_raised_and_stayed(start: Callable[..., World], point: str, rank: int, _: int) -> None:
    """Its process goes on, and so does Horovod's thread in it: the others end all the same."""
    world = start(Harm(point, "stay", rank))
    for end in world.ends([r for r in range(N) if r != rank]):
        check_survivor(end, f"rank {rank} failed ")


def check_named(end: End, *words: str) -> None:
    """It ended with an error that names an exchange: its own, or the one of the rank that was faster to report it."""
    assert end.code == 1, end.output
    assert "RankFailedError" in end.last_line or "The exchange " in end.last_line, end.output
    assert all(word in end.last_line for word in words), end.output


@pytest.mark.parametrize("_", TIMES)
@pytest.mark.parametrize("point", ["between_lookups", "backward"])
def test_stopped(start: Callable[..., World], point: str, _: int) -> None:
    """SIGSTOP stops Horovod's thread as well: after ``timeout`` the others end and name the exchange."""
    world = start(Harm(point, "stop", 1), timeout=4.0)
    for end in world.ends([0, 2]):
        check_named(end, "step 2")


@pytest.mark.parametrize("_", TIMES)
def test_stopped_in_the_start(start: Callable[..., World], _: int) -> None:
    """Horovod waits for a peer as long as we do, and then aborts the process: that must not come first, nor later."""
    world = start(Harm("start_of_horovod", "stop", 1, seconds=0.0), timeout=4.0)
    for end in world.ends([0, 2]):
        check_named(end, "start of Horovod", "within 4 s, the `timeout`")


@pytest.mark.parametrize("_", TIMES)
@pytest.mark.parametrize(
    ("point", "exchange"),
    [("exchange=gradients of block", "gradients of block"), ("after_lookup", "closing header of step 2")],
)
def test_skipped(start: Callable[..., World], point: str, exchange: str, _: int) -> None:
    """A rank leaves out an exchange, or the rest of a training step, and goes on: Horovod would wait for ever.

    All ranks end, and those who waited for it name what was left out.
    """
    ends = start(Harm(point, "skip", 1), timeout=4.0).ends()
    for end in ends:
        check_named(end, "step ")
    missed = [end for end in (ends[0], ends[2]) if f"The exchange '{exchange}" in end.output]
    assert missed, ends[0].output + ends[2].output


@pytest.mark.parametrize("_", TIMES)
def test_slow(start: Callable[..., World], _: int) -> None:
    """Horovod's thread answers for a rank that sleeps for longer than the others wait in one look."""
    for end in start(Harm("between_lookups", "sleep", 1)).ends():
        assert (end.code, end.last_line) == (0, "returned"), end.output
        assert end.notes() == []


def fit_unless(missing: int) -> None:
    if int(os.environ["LOCAL_RANK"]) == missing:
        return
    fit(Harm("setup", "none", 0), N, communication="horovod", timeout=4.0)


@pytest.mark.parametrize("_", TIMES)
@pytest.mark.parametrize("missing", [0, 2])
def test_missing(tmp_path: Path, missing: int, _: int) -> None:
    """A peer that never comes: it is missed before Horovod starts, which would abort the process."""
    world = World(tmp_path, N, functools.partial(fit_unless, missing))
    try:
        for end in world.ends([r for r in range(N) if r != missing]):
            assert end.code == 1, end.output
            assert "ExchangeError: The exchange 'meeting of all ranks' failed on rank " in end.last_line, end.output
            assert "within the `timeout` of 4 s" in end.last_line, end.output
    finally:
        world.clear()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    scripts: list[Script] = []

    def script(*arguments: str) -> Script:
        scripts.append(Script(tmp_path, "--communication", "horovod", *arguments))
        return scripts[-1]

    yield script
    for one in scripts:
        one.clear()


def test_missing_under_our_launcher(script: Callable[..., Script]) -> None:
    """The process that the Trainer has started does not come to it in time; none of the two is left."""
    arguments = ("--point", "before_trainer", "--kind", "sleep", "--rank", "1", "--seconds", "4", "--timeout", "3")
    started = script(*arguments)
    end = started.end()
    assert end.code == 1, end.output
    assert "ExchangeError: The exchange 'meeting of all ranks' failed on rank 0" in end.output
    assert "within the `timeout` of 3 s" in end.output
    assert started.left() == []


@pytest.mark.parametrize("point", ["after_lookup", "start_of_horovod"])
def test_killed_under_our_launcher(script: Callable[..., Script], point: str) -> None:
    """Nobody watches the children of a script whose main process is gone; they end by themselves."""
    started = script("--point", point, "--kind", "kill", "--rank", "0", "--seconds", "0")
    end = started.end()
    assert end.code == -signal.SIGKILL
    assert started.left() == []
    (note,) = end.notes()
    assert f"rank 1: rank 0 died {DIED}" in note
    assert "[rank1]: lightning_embrace.comm.control.RankFailedError: rank 0 died" in end.output
