"""Groups dense parameters into the blocks that are AllReduced together. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

#: a block's size: large enough for bandwidth, small enough to start during backward
BLOCK_BYTES = 25 << 20


class Member(NamedTuple):
    """What planning needs to know of a parameter."""

    name: str
    nbytes: int
    dtype: torch.dtype


def plan_blocks(members: Sequence[Member], block_bytes: int = BLOCK_BYTES) -> list[list[int]]:
    """Groups parameters in the order in which backward reaches them: last registered first.

    ```
    registered   a (10 MB)   b (10 MB)   c (10 MB)   d (40 MB)
    blocks       [d]  [c, b]  [a]            with block_bytes = 25 MB
    ```

    A block holds one dtype and at most ``block_bytes``, unless a single parameter is larger.

    Args:
        members: The parameters in registration order.
        block_bytes: Largest size of a block.

    Returns:
        Indices into ``members``, block by block.
    """
    blocks: list[list[int]] = []
    size = 0
    for index in reversed(range(len(members))):
        member = members[index]
        fits = bool(blocks) and members[blocks[-1][-1]].dtype == member.dtype and size + member.nbytes <= block_bytes
        if fits:
            blocks[-1].append(index)
            size += member.nbytes
        else:
            blocks.append([index])
            size = member.nbytes
    return blocks
