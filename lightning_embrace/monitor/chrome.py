"""Recordings as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

A rank is a process there and a lane a thread. Exchanges of one lane that are in flight together get threads of their
own ("dense group 2"); compute and waiting nest as calls do. An arrow leads from the moment when an exchange was queued
to the one when it was put on the wire, if these differ.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_embrace.monitor.intervals import pack, union
from lightning_embrace.monitor.span import LANES, Lane, Recording, Span

Trace = dict[str, Any]

# thread numbers: unique over all ranks, because some viewers do not keep the threads of two processes apart
_ROWS_PER_LANE = 1_000
_ROWS_PER_RANK = _ROWS_PER_LANE * len(LANES)
_ARROWS_PER_RANK = 1 << 32


def trace(recordings: Iterable[Recording]) -> Trace:
    """The trace of some ranks.

    Args:
        recordings: One per rank.

    Returns:
        A dict in the JSON object format of Chrome traces.
    """
    return merge([_part(recording) for recording in recordings])


def merge(parts: Sequence[Trace]) -> Trace:
    """Lays traces of different ranks over each other.

    Args:
        parts: What :func:`trace` returned, or :func:`read`.

    Returns:
        One trace, as if all ranks had been given to :func:`trace` at once.
    """
    timed = [part for part in parts if any("ts" in event for event in part["traceEvents"])]
    origins = [int(part["otherData"]["origin_ns"]) for part in timed]
    origin = min(origins, default=0)
    events = [
        event if event["ph"] == "M" else event | {"ts": _microseconds(_nanoseconds(event, part) - origin)}
        for part in parts
        for event in part["traceEvents"]
    ]
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0), event["pid"], event["tid"]))
    return {
        "displayTimeUnit": "ms",
        # a string: readers with floating point numbers alone would round it
        "otherData": {"origin_ns": str(origin)},
        "traceEvents": events,
    }


def write(path: str | os.PathLike[str], trace: Trace) -> None:
    """Writes a trace; whoever reads the file finds the old one or the whole new one.

    Args:
        path: Where to. Missing folders are made.
        trace: The trace.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump(trace, file, separators=(",", ":"))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace that was written with :func:`write`."""
    loaded: Trace = json.loads(Path(path).read_text(encoding="utf-8"))
    return loaded


def _part(recording: Recording) -> Trace:
    rank = recording.rank
    origin = min((span.first for span in recording.spans), default=0)
    events = [
        _meta(rank, 0, "process_name", {"name": f"rank {rank}"}),
        _meta(rank, 0, "process_sort_index", {"sort_index": rank}),
    ]
    if recording.dropped:
        events.append(_meta(rank, 0, "process_labels", {"labels": f"{recording.dropped} earlier spans were dropped"}))
    threads = _threads(recording)
    for thread, (name, _) in threads.items():
        events.append(_meta(rank, thread, "thread_name", {"name": name}))
        events.append(_meta(rank, thread, "thread_sort_index", {"sort_index": thread}))
    # the compute that asked for exchanges; what overlaps it in part, in another row, is the rarest case
    asking = _first_thread(rank, "compute")
    computing = union((s.begin, s.end) for s in threads.get(asking, ("", []))[1])
    number = rank * _ARROWS_PER_RANK
    for thread, (_, spans) in threads.items():
        for span in spans:
            events.append(_complete(span, rank, thread, origin))
            if span.queued is not None and span.queued < span.begin and _inside(span.queued, computing):
                number += 1
                events += _arrow(span, span.queued, number, asking, thread, rank, origin)
    return {"otherData": {"origin_ns": str(origin)}, "traceEvents": events}


def _threads(recording: Recording) -> dict[int, tuple[str, list[Span]]]:
    """Name and spans by thread."""
    threads: dict[int, tuple[str, list[Span]]] = {}
    for lane in LANES:
        spans = [span for span in recording.spans if span.lane == lane]
        rows = pack([(s.begin, s.end) for s in spans], nested=lane in ("compute", "waiting"))
        for row, span in sorted(zip(rows, spans), key=lambda pair: pair[0]):
            name = lane if row == 0 else f"{lane} {row + 1}"
            threads.setdefault(_first_thread(recording.rank, lane) + row, (name, []))[1].append(span)
    return threads


def _first_thread(rank: int, lane: Lane) -> int:
    return 1 + rank * _ROWS_PER_RANK + LANES.index(lane) * _ROWS_PER_LANE


def _meta(rank: int, thread: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": args}


def _complete(span: Span, rank: int, thread: int, origin: int) -> dict[str, Any]:
    args: dict[str, Any] = {"step": span.step, "kind": span.kind, "bytes": span.nbytes}
    if span.queued is not None:
        args["queued_us"] = _microseconds(span.begin - span.queued)
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "ts": _microseconds(span.begin - origin),
        "dur": _microseconds(span.end - span.begin),
        "pid": rank,
        "tid": thread,
        "args": {key: value for key, value in args.items() if value is not None} | dict(span.args),
    }


def _arrow(
    span: Span, queued: int, number: int, source: int, target: int, rank: int, origin: int
) -> list[dict[str, Any]]:
    """From the compute that asked for an exchange to the exchange."""
    both = {"name": "queued", "cat": span.lane, "id": number, "pid": rank}
    return [
        both | {"ph": "s", "ts": _microseconds(queued - origin), "tid": source},
        both | {"ph": "f", "bp": "e", "ts": _microseconds(span.begin - origin), "tid": target},
    ]


def _inside(time: int, intervals: list[tuple[int, int]]) -> bool:
    at = bisect_right(intervals, time, key=lambda interval: interval[0]) - 1
    return at >= 0 and time < intervals[at][1]


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1_000


def _nanoseconds(event: dict[str, Any], part: Trace) -> int:
    since_origin: float = event["ts"]
    return int(part["otherData"]["origin_ns"]) + round(since_origin * 1_000)
