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
from tests.faults.world import World

pytestmark = pytest.mark.horovod
N = 3
#: how often each test runs: `REPEAT=20 make test-horovod ARGS=tests/faults`
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


@pytest.mark.parametrize("_", TIMES)
@pytest.mark.parametrize(("point", "rank"), [("after_lookup", 1), ("backward", 0)])
def test_raised_and_stayed(start: Callable[..., World], point: str, rank: int, _: int) -> None:
    """Its process goes on, and so does Horovod's thread in it: the others end all the same."""
    world = start(Harm(point, "stay", rank))
    for end in world.ends([r for r in range(N) if r != rank]):
        check_survivor(end, f"rank {rank} failed ")


@pytest.mark.parametrize("_", TIMES)
@pytest.mark.parametrize("point", ["between_lookups", "backward"])
def test_stopped(start: Callable[..., World], point: str, _: int) -> None:
    """SIGSTOP stops Horovod's thread as well: after ``timeout`` the others end and name the exchange."""
    world = start(Harm(point, "stop", 1), timeout=4.0)
    for end in world.ends([0, 2]):
        assert end.code == 1, end.output
        assert "RankFailedError" in end.last_line or "The exchange '" in end.last_line, end.output
        assert "step 2" in end.last_line, end.output


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
