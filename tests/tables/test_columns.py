"""Every column has one owner, and the owner is the one that other tools expect."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_embrace.tables.columns import column_ranges

_columns = st.integers(0, 70)
_world_sizes = st.integers(1, 17)


@given(_columns, _world_sizes)
def test_partition(columns, world_size):
    """The ranges are a partition of the columns in rank order."""
    ranges = column_ranges(columns, world_size)
    assert len(ranges) == world_size
    assert [c for start, stop in ranges for c in range(start, stop)] == list(range(columns))


@given(_columns, _world_sizes)
def test_largest_share(columns, world_size):
    """Nobody owns more than ceil(D / N): the memory that the plan promises."""
    assert max(stop - start for start, stop in column_ranges(columns, world_size)) == -(-columns // world_size)


@given(st.integers(1, 70), _world_sizes)
def test_equals_chunk(columns, world_size):
    """The shares are torch.chunk's, which DTensor's ``Shard`` follows; ranks beyond its last chunk own nothing."""
    widths = [c.shape[1] for c in torch.empty(2, columns).chunk(world_size, dim=1)]
    widths += [0] * (world_size - len(widths))
    assert [stop - start for start, stop in column_ranges(columns, world_size)] == widths


def test_literal():
    """Spelled out, with fewer columns than ranks at the end."""
    assert column_ranges(10, 3) == [(0, 4), (4, 8), (8, 10)]
    assert column_ranges(16, 1) == [(0, 16)]
    assert column_ranges(2, 3) == [(0, 1), (1, 2), (2, 2)]
    assert column_ranges(5, 4) == [(0, 2), (2, 4), (4, 5), (5, 5)]
