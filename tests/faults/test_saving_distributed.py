"""A rank comes to harm while all save or load: the others end and name it, or wait for it; what is saved is whole."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.campaign import Reference, survey
from tests.faults.goes_on import STEPS, run
from tests.faults.test_ranks_distributed import DIED, check_survivor
from tests.faults.victim import Harm
from tests.faults.world import World

N = 3
FORMATS = ("full", "sharded")
NOBODY = Harm("train", "none", -1)
Start = Callable[..., World]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    worlds: list[World] = []

    def start(kind: str, harm: Harm, folder: Path | None = None, **options: Any) -> World:
        outputs = tmp_path / f"outputs-{len(worlds)}"
        outputs.mkdir()
        folder = folder or tmp_path / f"saved-{len(worlds)}"
        folder.mkdir(exist_ok=True)
        worlds.append(World(outputs, N, functools.partial(run, folder, harm, N, kind, **options)))
        worlds[-1].folder = folder  # type: ignore[attr-defined]
        return worlds[-1]

    yield start
    for world in worlds:
        world.clear()


@functools.cache
def _reference(kind: str, folder: Path) -> Reference:
    return Reference.make(kind, folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """What an undisturbed run saves."""
    parent = tmp_path_factory.mktemp("reference")
    return lambda kind: _reference(kind, parent / kind)


#: moment, rank and count in a run, one after another
KILLS = {
    "full": [("write", 0, -2), ("train", 1, 2)],
    "sharded": [("write", 1, 15), ("rename", 0, 0), ("load", 2, 0)],
}


@pytest.mark.parametrize("kind", FORMATS)
def test_killed(start: Start, reference: Any, kind: str) -> None:
    """kill -9 in a forward pass, amid the writing, before a checkpoint gets its name, and in loading.

    What is there is whole each time, and the run comes to where it would have come undisturbed.
    """
    expected, folder = reference(kind), None
    for moment, rank, count in KILLS[kind]:
        # -2: in the second half of all that rank 0 writes
        harm = Harm(moment, "kill", rank, count if count >= 0 else expected.count(moment) // 2 + 2)
        world = start(kind, harm, folder)
        folder = world.folder  # type: ignore[attr-defined]
        for other, end in enumerate(world.ends()):
            if other == rank:
                assert end.code == -signal.SIGKILL, end.output
            else:
                check_survivor(end, f"rank {rank} died {DIED}")
        assert survey(folder, expected) == []
    for end in start(kind, NOBODY, folder).ends():
        assert end.code == 0, end.output
    assert survey(folder, expected, ended=True) == []


@pytest.mark.parametrize("kind", FORMATS)
def test_slow_or_stopped(start: Start, kind: str) -> None:
    """Writing and reading may take longer than ``timeout``; a process that is stopped meanwhile is named."""
    timeout = 4.0
    slow = [Harm("write", "sleep", 0, 3, 1.5 * timeout), Harm("load", "sleep", 1, 0, 1.5 * timeout)]
    stopped = Harm("write", "stop", 0, 3)
    loading = start(kind, NOBODY)
    assert [end.code for end in loading.ends()] == [0] * N
    (loading.folder / f"step={STEPS}.ckpt").rename(loading.folder / "away")  # type: ignore[attr-defined]
    worlds = [
        start(kind, slow[0], timeout=timeout),
        start(kind, slow[1], folder=loading.folder, timeout=timeout),  # type: ignore[attr-defined]
        start(kind, stopped, timeout=timeout),
    ]
    for world in worlds[:2]:
        for end in world.ends():
            assert (end.code, end.last_line) == (0, "returned"), end.output
            assert end.notes() == []
    for end in worlds[2].ends([1, 2]):
        assert end.code == 1, end.output
        assert f"not answered for {timeout:g} s (`timeout`) whether its process is alive" in end.last_line
        assert "Rank 0 has not come to 'writing a checkpoint'" in end.output


@pytest.mark.parametrize("kind", FORMATS)
def test_raised(start: Start, kind: str) -> None:
    """An error in writing is one error everywhere."""
    for end in start(kind, Harm("write", "raise", 0, 3)).ends():
        assert end.code == 1, end.output
        assert "CheckpointError: The checkpoint " in end.last_line
        assert "on rank 0: ValueError: harm at write" in end.last_line
