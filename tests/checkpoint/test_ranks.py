"""Each rank's own part of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_embrace.checkpoint.ranks import KEY, part_of

PARTS: list[Any] = [{"random": {"torch": 0}, "loaders": None}, {"random": {"torch": 1}, "loaders": [{"position": 1}]}]


def test_each_rank_finds_its_own() -> None:
    assert [part_of({KEY: PARTS}, rank, 2) for rank in range(2)] == [(part, None) for part in PARTS]


@pytest.mark.parametrize(
    ("checkpoint", "world_size", "reason"),
    [
        ({}, 2, "it was not written under `embrace` or `hydra`"),
        ({KEY: PARTS}, 3, "it was written by 2 ranks, and now there are 3"),
        ({KEY: PARTS[:1]}, 2, "it was written by 1 rank, and now there are 2"),
    ],
)
def test_none_for_other_ranks(checkpoint: dict[str, Any], world_size: int, reason: str) -> None:
    """Also where some of the ranks would find something: all draw on, or none does."""
    assert {part_of(checkpoint, rank, world_size) for rank in range(world_size)} == {(None, reason)}
