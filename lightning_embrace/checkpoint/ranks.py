"""What a checkpoint holds for each rank by itself: its random numbers, and its loaders' positions."""

from __future__ import annotations

from typing import Any, TypedDict

#: a list with an entry for each rank, beside Lightning's own keys
KEY = "embrace_ranks"


class RankState(TypedDict):
    """One rank's own part of a checkpoint.

    Attributes:
        random: See :func:`~lightning_embrace.checkpoint.random_states.random_states`.
        loaders: The states of its training loaders, None: they have none. Lightning keeps rank 0's.
    """

    random: dict[str, Any]
    loaders: list[Any] | None


def part_of(checkpoint: dict[str, Any], rank: int, world_size: int) -> tuple[RankState | None, str | None]:
    """Looks for a rank's own part.

    Args:
        checkpoint: A checkpoint with which training goes on.
        rank: The rank.
        world_size: Number of ranks.

    Returns:
        The part, or None and the reason, the same on every rank.
    """
    parts: list[RankState] | None = checkpoint.get(KEY)
    if parts is None:
        return None, "it was not written under `embrace` or `hydra`"
    if len(parts) != world_size:
        return None, f"it was written by {len(parts)} rank{'s' * (len(parts) != 1)}, and now there are {world_size}"
    return parts[rank], None
