"""Worker processes shared by all tests of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(n)`` gives n worker processes, started when first used."""
    pools: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        return pools.setdefault(world_size, Ranks(world_size))

    yield get
    for pool in pools.values():
        pool.stop()
