"""The blocks of dense parameters: a pure function of names, sizes and dtypes, the same on every rank."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_embrace.schedule.blocks import BLOCK_BYTES, Member, plan_blocks

MB = 1 << 20
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
MEMBERS = st.lists(st.builds(Member, st.just("p"), st.integers(0, 60), st.sampled_from(DTYPES)), max_size=20)


def test_the_table_in_the_docstring() -> None:
    members = [
        Member(name, megabytes * MB, torch.float32) for name, megabytes in (("a", 10), ("b", 10), ("c", 10), ("d", 40))
    ]
    blocks = plan_blocks(members, block_bytes=25 * MB)
    assert [[members[i].name for i in block] for block in blocks] == [["d"], ["c", "b"], ["a"]]
    assert BLOCK_BYTES == 25 * MB


def test_no_parameters_no_blocks() -> None:
    assert plan_blocks([]) == []


def test_a_block_holds_one_dtype() -> None:
    """They share one flat buffer; one that comes back later opens a new block, to keep the order backward's."""
    dtypes = [torch.float32, torch.float64, torch.float32]
    assert plan_blocks([Member("p", 1, dtype) for dtype in dtypes]) == [[2], [1], [0]]


@given(MEMBERS, st.integers(1, 100))
def test_every_parameter_once_in_backward_order(members: list[Member], block_bytes: int) -> None:
    blocks = plan_blocks(members, block_bytes)
    assert list(itertools.chain(*blocks)) == list(reversed(range(len(members))))


@given(MEMBERS, st.integers(1, 100))
def test_blocks_are_as_large_as_allowed_and_no_larger(members: list[Member], block_bytes: int) -> None:
    blocks = plan_blocks(members, block_bytes)
    sizes = [sum(members[i].nbytes for i in block) for block in blocks]
    for block, size in zip(blocks, sizes):
        assert len({members[i].dtype for i in block}) == 1
        assert size <= block_bytes or len(block) == 1
    for block, following, size in zip(blocks, blocks[1:], sizes):
        first = members[following[0]]
        assert first.dtype != members[block[0]].dtype or size + first.nbytes > block_bytes
