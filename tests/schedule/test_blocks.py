"""The blocks of dense parameters: a pure function of names, sizes and dtypes, the same on every rank."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_embrace.schedule.blocks import (
    BLOCK_BYTES,
    SMALL_BYTES,
    Member,
    issue_order,
    layer_of,
    plan_blocks,
    tuned_chunk,
)

MB = 1 << 20
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
MEMBERS = st.lists(st.builds(Member, st.just("p"), st.integers(0, 60), st.sampled_from(DTYPES)), max_size=20)


def test_the_table_in_the_docstring() -> None:
    sizes = (("a.w", 10.0), ("b.w", 10.0), ("b.v", 0.2), ("c.w", 0.1), ("d.w", 40.0))
    members = [Member(name, int(megabytes * MB), torch.float32) for name, megabytes in sizes]
    blocks = plan_blocks(members, block_bytes=25 * MB, small_bytes=MB)
    assert [[members[i].name for i in block] for block in blocks] == [["d.w"], ["c.w", "b.v", "b.w"], ["a.w"]]
    assert (BLOCK_BYTES, SMALL_BYTES) == (25 * MB, MB)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("encoder.layers.3.linear1.weight", "encoder.layers.3"),
        ("lstm.weight_ih_l0", "lstm"),
        ("layer1.0.conv1.weight", "layer1.0"),
        ("scale", ""),
    ],
)
def test_a_layer_is_an_element_of_a_list_or_a_module(name: str, layer: str) -> None:
    """The next forward pass waits for a block; more than a layer in it would wait for too much."""
    assert layer_of(name) == layer


BLOCKS = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), st.integers(0, 60)), max_size=6)


@given(BLOCKS)
def test_the_order_on_the_wire(blocks: list[tuple[list[int], int]]) -> None:
    """Each chunk once, a block's in order; never one before another that was there and that forward needs earlier."""
    chunks, arrivals = [list(sizes) for sizes, _ in blocks], [at for _, at in blocks]
    arriving = [(block, chunk) for block, sizes in enumerate(chunks) for chunk in range(len(sizes))]
    order = issue_order(chunks, arrivals)
    assert sorted(order) == arriving
    sent = 0
    for position, (block, chunk) in enumerate(order):
        sent = max(sent, min(arrivals[b] for b, _ in order[position:]))  # nothing there: the wire waits
        assert arrivals[block] <= sent
        assert not [b for b, c in order[position:] if arrivals[b] <= sent and (-b, c) < (-block, chunk)]
        sent += chunks[block][chunk]


def test_the_first_step_goes_as_backward_does() -> None:
    """Nothing is known yet of when blocks are there."""
    assert issue_order([[1, 1], [], [1]], None) == [(0, 0), (0, 1), (2, 0)]


def test_the_example_in_the_docstring() -> None:
    assert [block for block, _ in issue_order([[1, 1, 1], [1, 1], [1]], [0, 1, 4])] == [0, 1, 1, 0, 2, 0]


def test_what_all_have_at_once_goes_in_forward_order() -> None:
    """Long after backward has ended, say: the blocks' order turns round."""
    assert issue_order([[5], [5], [5]], [7, 7, 7]) == [(2, 0), (1, 0), (0, 0)]


@pytest.mark.parametrize(
    ("rate", "world_size", "chunk"),
    [
        (0.0, 2, 4 * MB),  # nothing is known yet
        (8e6, 2, 400_000),  # 50 ms
        (8e6, 8, MB),  # 50 ms would make messages of 50 KB, and their number would take more CPU than their bytes
        (2e6, 8, 300_000),  # but urgent exchanges do not wait longer than 150 ms for that
        (1e5, 8, 1 << 16),
        (1e9, 8, 4 * MB),
    ],
)
def test_a_chunk_is_short_but_not_made_of_small_messages(rate: float, world_size: int, chunk: int) -> None:
    """Regression: with eight ranks chunks of 50 ms took 60, for latency; that was taken for a slow wire, and the next
    ones were smaller still, down to half of the link's rate and twice the CPU."""
    assert tuned_chunk(rate, world_size) == chunk


def test_no_parameters_no_blocks() -> None:
    assert plan_blocks([]) == []


def test_a_block_holds_one_dtype() -> None:
    """They share one flat buffer; one that comes back later opens a new block, to keep the order backward's."""
    dtypes = [torch.float32, torch.float64, torch.float32]
    assert plan_blocks([Member("p", 1, dtype) for dtype in dtypes]) == [[2], [1], [0]]


@given(MEMBERS, st.integers(1, 100))
def test_every_parameter_once_in_backward_order(members: list[Member], block_bytes: int) -> None:
    blocks = plan_blocks(members, block_bytes, small_bytes=block_bytes)
    assert list(itertools.chain(*blocks)) == list(reversed(range(len(members))))


@given(MEMBERS, st.integers(1, 100))
def test_blocks_are_as_large_as_allowed_and_no_larger(members: list[Member], block_bytes: int) -> None:
    blocks = plan_blocks(members, block_bytes, small_bytes=block_bytes)
    sizes = [sum(members[i].nbytes for i in block) for block in blocks]
    for block, size in zip(blocks, sizes):
        assert len({members[i].dtype for i in block}) == 1
        assert size <= block_bytes or len(block) == 1
    for block, following, size in zip(blocks, blocks[1:], sizes):
        first = members[following[0]]
        assert first.dtype != members[block[0]].dtype or size + first.nbytes > block_bytes
