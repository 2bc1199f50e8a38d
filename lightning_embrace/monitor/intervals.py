"""Arithmetic with intervals of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as disjoint intervals in order; empty ones are left out."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def common(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """The times in both."""
    ours, theirs = union(left), union(right)
    found: list[Interval] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        begin, end = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])
        if begin < end:
            found.append((begin, end))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> int:
    """How long they are together; what is covered twice counts once."""
    return sum(end - begin for begin, end in union(intervals))


def pack(intervals: Sequence[Interval], nested: bool = False) -> list[int]:
    """Lays intervals out in rows, so that none covers another: as few rows as there are intervals at one time.

    Args:
        intervals: The intervals.
        nested: One may lie wholly inside another of its row, as calls do.

    Returns:
        The row of each interval, counted from 0.
    """
    rows: list[list[int]] = []  # the ends of what is open in each row, the innermost last
    placed = [0] * len(intervals)
    for i in sorted(range(len(intervals)), key=lambda i: (intervals[i][0], -intervals[i][1])):
        begin, end = intervals[i]
        for ends in rows:
            while ends and ends[-1] <= begin:
                ends.pop()
        free = (number for number, ends in enumerate(rows) if not ends or (nested and end <= ends[-1]))
        placed[i] = next(free, len(rows))
        if placed[i] == len(rows):
            rows.append([])
        rows[placed[i]].append(end)
    return placed
