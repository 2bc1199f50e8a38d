"""Which rank owns which columns of a table."""

from __future__ import annotations


def column_ranges(columns: int, world_size: int) -> list[tuple[int, int]]:
    """Splits a table's columns over the ranks, as DTensor's ``Shard(1)`` does (``torch.chunk``).

    The largest share is ceil(D / N), the smallest possible; when N does not divide D the last ranks own fewer columns
    or none. Following DTensor's rule, and not another one with the same largest share, is what lets
    torch.distributed.checkpoint and other tools read the shards.

    Args:
        columns: D, the table's embedding dimension.
        world_size: N, the number of ranks.

    Returns:
        Per rank its half-open range of columns ``(start, stop)``.
    """
    share = -(-columns // world_size)
    return [(min(r * share, columns), min((r + 1) * share, columns)) for r in range(world_size)]
