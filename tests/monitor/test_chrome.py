"""Traces follow the format that Perfetto and chrome://tracing read, whatever was recorded."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_embrace.monitor import chrome
from lightning_embrace.monitor.span import LANES, Recording, Span
from tests.monitor.schema import check

EPOCH = 1_790_000_000_000_000_000  # nanoseconds; no multiple of a float's resolution there


@st.composite
def spans(draw: st.DrawFn) -> Span:
    lane = draw(st.sampled_from(LANES))
    first, queue, long = (draw(st.integers(0, 50)) for _ in range(3))
    step = draw(st.none() | st.integers(0, 3))
    begin = EPOCH + first * 777 + queue
    if lane in ("sparse group", "dense group"):
        return Span("rows", lane, begin, begin + long * 333, step, "rows", 8, begin - queue, {"received": 8})
    return Span("forward", lane, begin, begin + long * 333, step)


def recordings(size: int) -> st.SearchStrategy[list[Recording]]:
    one = st.lists(spans(), max_size=8).map(tuple)
    return st.lists(one, min_size=size, max_size=size).map(
        lambda parts: [Recording(rank, part) for rank, part in enumerate(parts)]
    )


@given(recordings(2))
def test_every_trace_follows_the_format(parts: list[Recording]) -> None:
    check(json.loads(json.dumps(chrome.trace(parts))))


@given(recordings(3))
def test_merging_parts_is_the_trace_of_all(parts: list[Recording]) -> None:
    """Ranks that wrote their own files after a failure give the picture that one gather would have given."""
    whole = chrome.trace(parts)
    assert chrome.merge([chrome.trace([part]) for part in parts]) == whole
    assert chrome.merge([chrome.trace(parts[:2]), chrome.trace(parts[2:])]) == whole


@given(recordings(2))
def test_times_and_facts_come_back_to_the_nanosecond(parts: list[Recording]) -> None:
    """Seconds since the epoch in a float would be off by a quarter of a microsecond, and nesting with them."""
    trace = chrome.trace(parts)
    origin = int(trace["otherData"]["origin_ns"])
    shown = sorted(
        (e["pid"], e["cat"], origin + round(e["ts"] * 1e3), round(e["dur"] * 1e3), e["args"].get("bytes", -1))
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    )
    assert shown == sorted(
        (r.rank, s.lane, s.begin, s.end - s.begin, -1 if s.nbytes is None else s.nbytes) for r in parts for s in r.spans
    )


def test_a_rank_is_a_process_and_a_lane_a_thread_in_a_fixed_order() -> None:
    recording = Recording(3, tuple(Span(lane, lane, EPOCH, EPOCH + 5) for lane in reversed(LANES)))
    meta = [e for e in chrome.trace([recording])["traceEvents"] if e["ph"] == "M"]
    names = {e["tid"]: e["args"]["name"] for e in meta if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in meta if e["name"] == "thread_sort_index"}
    assert [names[t] for t in sorted(names, key=order.__getitem__)] == list(LANES)
    assert {e["args"]["name"] for e in meta if e["name"] == "process_name"} == {"rank 3"}


def test_exchanges_in_flight_together_get_rows_of_their_own() -> None:
    flying = tuple(Span(f"block {k}", "dense group", EPOCH + k, EPOCH + 10 + k, queued=EPOCH + k) for k in range(3))
    assert sorted(threads(chrome.trace([Recording(0, flying)]))) == ["dense group", "dense group 2", "dense group 3"]


def test_an_arrow_leads_from_the_compute_that_asked_to_the_exchange() -> None:
    forward = Span("backward", "compute", EPOCH, EPOCH + 9_000, 1)
    asked = Span("block", "dense group", EPOCH + 5_000, EPOCH + 20_000, 1, "dense", 8, EPOCH + 2_000)
    nowhere = Span("rows", "dense group", EPOCH + 30_000, EPOCH + 31_000, 1, "rows", 8, EPOCH + 29_000)
    arrows = [
        e for e in chrome.trace([Recording(0, (forward, asked, nowhere))])["traceEvents"] if e["ph"] in ("s", "f")
    ]
    assert [(e["ph"], e["ts"]) for e in arrows] == [("s", 2.0), ("f", 5.0)]
    assert arrows[0]["id"] == arrows[1]["id"] and arrows[0]["tid"] != arrows[1]["tid"]


def test_a_rank_without_spans_moves_nobody_s_origin() -> None:
    """Its origin would be the epoch itself, and all other times too large for a float."""
    span = Span("forward", "compute", EPOCH + 1, EPOCH + 2)
    trace = chrome.trace([Recording(0, (span,)), Recording(1, ())])
    assert trace["otherData"]["origin_ns"] == str(EPOCH + 1)
    assert chrome.trace([])["traceEvents"] == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    trace = chrome.trace([Recording(0, (Span("forward", "compute", EPOCH, EPOCH + 5),))])
    chrome.write(path, trace)
    assert chrome.read(path) == trace
    with pytest.raises(TypeError):
        chrome.write(path, {"traceEvents": [object()]})
    assert chrome.read(path) == trace
    assert [p.name for p in path.parent.iterdir()] == ["trace.json"]


def threads(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found
