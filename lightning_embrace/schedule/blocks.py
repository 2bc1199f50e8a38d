"""Groups dense parameters into blocks, and orders their chunks on the wire. Pure functions."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

#: a block's largest size: large enough for bandwidth, small enough to start during backward
BLOCK_BYTES = 25 << 20
#: neighbours smaller than this share a block: an exchange costs latency
SMALL_BYTES = 1 << 20
#: what travels at once, at most and at least
CHUNK_BYTES = (1 << 16, 4 << 20)
#: how long a chunk should take, where its messages are large enough: an urgent exchange soon has the link to itself
CHUNK_SECONDS = 50e-3
#: an AllReduce sends a rank's N-th part of it from rank to rank: where that is smaller, the work for the messages takes
#: twice the CPU that the bytes need, and the link idles meanwhile
MESSAGE_BYTES = 1 << 17
#: how long a chunk may take for that
LONGEST_CHUNK_SECONDS = 150e-3


class Member(NamedTuple):
    """What planning needs to know of a parameter."""

    name: str
    nbytes: int
    dtype: torch.dtype


def layer_of(name: str) -> str:
    """The part of a model that a parameter belongs to: an element of a ModuleList or Sequential, else its module.

    ``"encoder.layers.3.linear1.weight"`` → ``"encoder.layers.3"``, ``"lstm.weight_ih_l0"`` → ``"lstm"``.
    """
    path = name.split(".")[:-1]
    first = next((k for k, part in enumerate(path) if part.isdigit()), len(path))
    return ".".join(path[: first + 1])


def plan_blocks(
    members: Sequence[Member], block_bytes: int = BLOCK_BYTES, small_bytes: int = SMALL_BYTES
) -> list[list[int]]:
    """Groups parameters by layer, in the order in which backward reaches them: last registered first.

    ```
    registered   a.w (10 MB)   b.w (10 MB)   b.v (0.2 MB)   c.w (0.1 MB)   d.w (40 MB)
    blocks       [d.w]  [c.w, b.v, b.w]  [a.w]            with block_bytes = 25 MB, small_bytes = 1 MB
    ```

    A block holds one dtype and at most ``block_bytes``, unless a single parameter is larger. It ends with its layer,
    unless it is smaller than ``small_bytes`` by then.

    Args:
        members: The parameters in registration order.
        block_bytes: Largest size of a block.
        small_bytes: Size from which a block ends with its layer.

    Returns:
        Indices into ``members``, block by block.
    """
    blocks: list[list[int]] = []
    size = 0
    for index in reversed(range(len(members))):
        member = members[index]
        if blocks:
            before = members[blocks[-1][-1]]
            fits = before.dtype == member.dtype and size + member.nbytes <= block_bytes
            if fits and (size < small_bytes or layer_of(before.name) == layer_of(member.name)):
                blocks[-1].append(index)
                size += member.nbytes
                continue
        blocks.append([index])
        size = member.nbytes
    return blocks


def tuned_chunk(rate: float, world_size: int) -> int:
    """Bytes of a gradient that travel at once.

    Args:
        rate: Bytes of gradients that have come through in a second; 0: not known.
        world_size: Number of ranks.
    """
    smallest, largest = CHUNK_BYTES
    if rate <= 0:
        return largest
    cheap = min(world_size * MESSAGE_BYTES, int(rate * LONGEST_CHUNK_SECONDS))
    return max(smallest, min(largest, max(cheap, int(rate * CHUNK_SECONDS))))


def issue_order(chunks: Sequence[Sequence[int]], arrivals: Sequence[int] | None) -> list[tuple[int, int]]:
    """In which order the chunks of all blocks go on the wire (paper, section 4.2.1).

    Of what is there, what the next forward pass needs first: the block that backward reached last. What is there when
    is taken from the step before, where all ranks agreed on it; a block that comes later than then is waited for.

    ```
    chunks     3 of block 0   2 of block 1   1 of block 2, of one byte each
    arrivals   0              1              4
    order      0  1  1  0  2  0
    ```

    Args:
        chunks: Bytes of each chunk of each block, in backward order.
        arrivals: By block, how many bytes had gone on the wire when the slowest rank had its gradient, or could have
            gone; None: not known, and the blocks go in backward order, first come, first served.

    Returns:
        (block, chunk) for every chunk, each once.
    """
    if arrivals is None:
        return [(block, chunk) for block, sizes in enumerate(chunks) for chunk in range(len(sizes))]
    coming = deque(sorted((at, block) for block, at in enumerate(arrivals)))
    there: list[tuple[int, int]] = []  # a heap, the last block first
    order: list[tuple[int, int]] = []
    sent = 0
    while coming or there:
        if not there:
            sent = max(sent, coming[0][0])
        while coming and coming[0][0] <= sent:
            block = coming.popleft()[1]
            if chunks[block]:
                heapq.heappush(there, (-block, 0))
        if there:
            place, chunk = there[0]
            order.append((-place, chunk))
            sent += chunks[-place][chunk]
            if chunk + 1 < len(chunks[-place]):
                heapq.heapreplace(there, (place, chunk + 1))
            else:
                heapq.heappop(there)
    return order
