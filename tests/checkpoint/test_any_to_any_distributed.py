"""Checkpoints go from any strategy on any number of ranks to any other, and training goes on with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightning_embrace.checkpoint.consolidate import consolidate
from tests.checkpoint.folders import ordered
from tests.checkpoint.portable import ENDS, End, checkpoint_in, go_on, write
from tests.support.lifecycle import assert_same
from tests.support.ranks import Ranks

TOLERANCE = 1e-10
ONE = End("one process", 1)


class Written(NamedTuple):
    """A checkpoint.

    Attributes:
        state: What rank 0 had when it was saved.
        own: As it was written, a file or a folder.
        file: As a file, through consolidation.
    """

    state: dict[str, Any]
    own: Path
    file: Path


Sources = Callable[[End], Written]


@pytest.fixture(scope="module")
def sources(ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Each checkpoint is written once, when it is first asked for."""
    parent = tmp_path_factory.mktemp("any")

    @cache
    def get(source: End) -> Written:
        folder = parent / str(source)
        state, *_ = ranks(source.world_size).run(write, source, str(folder))
        own = checkpoint_in(folder)
        file = own
        if own.is_dir():
            file = folder / "consolidated.ckpt"
            consolidate(own, file)
        return Written(state, own, file)

    return get


@pytest.fixture(scope="module")
def expected(ranks: Callable[[int], Ranks], sources: Sources) -> tuple[dict[str, Any], dict[str, Any]]:
    """One process that goes on from its own checkpoint: what every pair must come to."""
    [(loaded, ended)] = ranks(1).run(go_on, ONE, str(sources(ONE).own))
    return loaded, ended


def check(ranks: Callable[[int], Ranks], source: End, target: End, path: Path, states: list[dict[str, Any]]) -> None:
    for got, wanted in zip(ranks(target.world_size).run(go_on, target, str(path))[0], states, strict=True):
        without = {"fsdp"} & {source.kind, target.kind}
        for key in wanted:
            if key != "scaler" or not without:
                assert_same(ordered(got[key]), ordered(wanted[key]), key, TOLERANCE)


def moves(ranks: Callable[[int], Ranks], sources: Sources, expected: Any, source: End, target: End) -> None:
    written = sources(source)
    for key, wanted in expected[0].items():
        if key != "scaler" or source.kind != "fsdp":
            assert_same(ordered(written.state[key]), ordered(wanted), f"saved {key}", TOLERANCE)
    own = source.kind != "fsdp" and target.kind in ("full", "sharded")
    check(ranks, source, target, written.own if own else written.file, list(expected))


PAIRS = list(product(ENDS, ENDS))
#: every kind is written and read, and 1, 2, 3 and 4 ranks on both sides
SAMPLE = [
    (End("sharded", 4), End("sharded", 2)),
    (End("sharded", 2), End("sharded", 3)),
    (End("sharded", 3), ONE),
    (End("sharded", 2), End("full", 1)),
    (ONE, End("sharded", 4)),
    (End("ddp", 2), End("sharded", 3)),
    (End("full", 3), End("sharded", 1)),
    (End("sharded", 4), End("ddp", 3)),
    (End("fsdp", 2), End("full", 4)),
    (End("sharded", 3), End("fsdp", 2)),
]


@pytest.mark.parametrize(("source", "target"), SAMPLE, ids=str)
def test_moves(ranks: Callable[[int], Ranks], sources: Sources, expected: Any, source: End, target: End) -> None:
    """Weights, optimizer states, scheduler and scaler arrive, and two more steps come to the same, for the sample."""
    moves(ranks, sources, expected, source, target)


@pytest.mark.matrix
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_moves_everywhere(
    ranks: Callable[[int], Ranks], sources: Sources, expected: Any, source: End, target: End
) -> None:
    """The same for every pair."""
    moves(ranks, sources, expected, source, target)


@pytest.mark.parametrize("target", [End("sharded", 3), End("full", 2)], ids=str)
def test_folders_of_fsdp(ranks: Callable[[int], Ranks], sources: Sources, expected: Any, target: End) -> None:
    """A folder that ModelParallelStrategy has written with FSDP2 is read as it is, without consolidation."""
    source = End("fsdp", 2)
    written = sources(source)
    assert written.own.is_dir()
    check(ranks, source, target, written.own, list(expected))


def test_sample_has_every_kind_and_number() -> None:
    """On both sides."""
    for side in (0, 1):
        ends = [pair[side] for pair in SAMPLE]
        assert {end.kind for end in ends} == {end.kind for end in ENDS}
        assert {end.world_size for end in ends} == {1, 2, 3, 4}
    assert set(SAMPLE) <= set(PAIRS) and len(PAIRS) == len(ENDS) ** 2 == 256
