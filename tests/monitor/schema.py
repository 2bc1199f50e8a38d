"""What the Chrome trace format asks of a file, after its document (Trace Event Format) and Perfetto's importer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}


def check(trace: dict[str, Any]) -> None:
    """Raises where a loaded file breaks a rule."""
    events = trace["traceEvents"]
    for event in events:
        assert event.keys() == REQUIRED[event["ph"]] | {"ph"}, event
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        assert all(isinstance(event.get(key, 0), int | float) and event.get(key, 0) >= 0 for key in ("ts", "dur"))
    _check_names(events)
    _check_threads(events)
    _check_arrows(events)


def _check_names(events: list[dict[str, Any]]) -> None:
    """Every process and thread has one name, and no thread number stands for two."""
    named = [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"]
    assert len(named) == len(set(named)) == len({tid for _, tid in named})
    processes = [e["pid"] for e in events if e["name"] == "process_name"]
    assert len(processes) == len(set(processes))
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= set(named)
    assert {e["pid"] for e in events} <= set(processes)


def _check_threads(events: list[dict[str, Any]]) -> None:
    """Complete events of one thread do not overlap in part."""
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1e3)
            slices[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1e3)))
    for of_thread in slices.values():
        for n, (b, e) in enumerate(of_thread):
            for begin, end in of_thread[:n]:
                nested = (b <= begin and end <= e) or (begin <= b and e <= end)
                assert e <= begin or end <= b or nested


def _check_arrows(events: list[dict[str, Any]]) -> None:
    """Each has two ends in this order, each within a slice of its thread: else viewers drop it."""
    ends: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "f"):
            ends[event["id"]].append(event)
            assert any(
                e["ph"] == "X" and e["tid"] == event["tid"] and e["ts"] <= event["ts"] <= e["ts"] + e["dur"] + 1e-6
                for e in events
            )
    for pair in ends.values():
        assert [e["ph"] for e in pair] == ["s", "f"] and pair[0]["ts"] < pair[1]["ts"]
