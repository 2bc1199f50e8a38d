"""What a timeline consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

#: Where a span belongs: what this rank computes, what is in flight on each group, and where a thread stands still.
Lane = Literal["compute", "sparse group", "dense group", "waiting"]
LANES: tuple[Lane, ...] = get_args(Lane)

Value = str | int | float | bool


@dataclass(frozen=True)
class Span:
    """Something that took time on one rank. Times are nanoseconds since the epoch.

    Attributes:
        name: The exchange's name as in errors and profiles, or what was computed.
        lane: Where it belongs.
        begin: When it started; for an exchange, when it was put on the wire.
        end: When it ended.
        step: The step in which it was begun, None outside training.
        kind: An exchange's entry in :class:`~lightning_embrace.comm.traffic.Traffic`.
        nbytes: What this rank sent to others, counted as there.
        queued: When an exchange was asked for.
        args: More to show with it. ``"unfinished"``: it had not ended when it was shown, ``"error"``: what it raised,
            ``"group"``: the lane of the exchange that was waited for.
    """

    name: str
    lane: Lane
    begin: int
    end: int
    step: int | None = None
    kind: str | None = None
    nbytes: int | None = None
    queued: int | None = None
    args: Mapping[str, Value] = field(default_factory=dict)

    @property
    def is_exchange(self) -> bool:
        """Whether it was in flight between ranks."""
        return self.lane in ("sparse group", "dense group")

    @property
    def first(self) -> int:
        """When it is seen first."""
        return self.begin if self.queued is None else self.queued


@dataclass(frozen=True)
class Recording:
    """All that one rank has seen.

    Attributes:
        rank: The rank.
        spans: Its spans, in the order of their beginnings.
        dropped: How many older spans there were no room for.
    """

    rank: int
    spans: tuple[Span, ...]
    dropped: int = 0
