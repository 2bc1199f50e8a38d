"""What is recorded, from which thread, and what torch's profiler sees of it."""

from __future__ import annotations

import json
import pickle
import threading
import time

import pytest
import torch

from lightning_embrace.monitor import chrome
from lightning_embrace.monitor.span import Span
from lightning_embrace.monitor.timeline import Profiled, Timeline


def only(timeline: Timeline) -> Span:
    (span,) = timeline.recording().spans
    return span


def test_a_span_is_wall_time_of_its_step() -> None:
    """Ranks on different machines are laid over each other by it."""
    timeline = Timeline(1, 2)
    timeline.at_step(7)
    before = time.time_ns()
    with timeline.span("forward", "compute", batch=3):
        timeline.at_step(8)
        time.sleep(0.002)
    after = time.time_ns()
    span = only(timeline)
    assert (span.name, span.lane, span.step, span.args) == ("forward", "compute", 7, {"batch": 3})
    assert before - 1e6 < span.begin < span.end < after + 1e6  # the two clocks are not read at the same instant
    assert span.end - span.begin >= 2e6


def test_a_known_error_of_the_clock_is_corrected_also_afterwards() -> None:
    timeline = Timeline(0, 2)
    with timeline.span("forward", "compute"):
        pass
    timeline.queued("rows", "sparse group", "rows", 8).done()
    before = timeline.recording().spans
    timeline.clock_offset = 5_000
    after = timeline.recording().spans
    assert [(s.begin, s.end) for s in after] == [(s.begin + 5_000, s.end + 5_000) for s in before]
    assert after[1].queued == (before[1].queued or 0) + 5_000


def test_a_span_that_raises_is_recorded_and_raises() -> None:
    timeline = Timeline(0, 1)
    with pytest.raises(ValueError, match="boom"), timeline.span("forward", "compute"):
        raise ValueError("boom")
    assert only(timeline).name == "forward"


def test_an_exchange_is_queued_then_started_then_done() -> None:
    timeline = Timeline(0, 2)
    exchange = timeline.queued("rows of table", "sparse group", "rows", 80, received=40)
    exchange.started()
    exchange.done()
    first = only(timeline)
    exchange.started()
    exchange.done()
    assert only(timeline) == first  # of repeated news the first counts
    assert first.queued is not None and first.queued <= first.begin <= first.end
    assert (first.kind, first.nbytes, first.args) == ("rows", 80, {"received": 40})


def test_an_exchange_in_flight_is_shown_as_unfinished() -> None:
    """After a failure it is the one that everybody looks for."""
    timeline = Timeline(0, 2)
    exchange = timeline.queued("rows", "sparse group", "rows", 8)
    assert only(timeline).args == {"unfinished": True}
    exchange.done()
    assert only(timeline).args == {}


def test_an_exchange_that_breaks_says_how_although_its_end_was_told_before() -> None:
    """The transport's callback knows no reason; whoever waits learns it later."""
    timeline = Timeline(0, 2)
    exchange = timeline.queued("rows", "sparse group", "rows", 8)
    exchange.done()
    end = only(timeline).end
    with pytest.raises(RuntimeError), exchange.waiting():
        raise RuntimeError("rank 1 failed")
    span = next(s for s in timeline.recording().spans if s.is_exchange)
    assert span.args == {"error": "RuntimeError: rank 1 failed"} and span.end == end


def test_waiting_is_a_span_of_its_own_that_names_the_group() -> None:
    timeline = Timeline(0, 2)
    with timeline.queued("block 1", "dense group", "dense", 8).waiting():
        pass
    exchange, wait = timeline.recording().spans
    assert (wait.name, wait.lane, wait.args) == ("wait block 1", "waiting", {"group": "dense group"})
    assert exchange.args == {} and exchange.end <= wait.end


def test_waiting_in_the_background_holds_nobody_up() -> None:
    timeline = Timeline(0, 2)

    def work() -> None:
        timeline.in_background()
        with timeline.queued("block 1", "dense group", "dense", 8).waiting():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert only(timeline).lane == "dense group"
    timeline.waited("rows", 0, 1)  # this thread is not in the background
    assert len(timeline.recording().spans) == 2


def test_what_another_thread_issues_later_belongs_to_the_step_that_asked_for_it() -> None:
    timeline = Timeline(0, 2)
    timeline.at_step(3)
    moment = timeline.moment()
    timeline.at_step(4)
    with timeline.queued_at(moment):
        timeline.queued("delayed rows", "dense group", "grads", 8).done()
    timeline.queued("rows", "sparse group", "rows", 8).done()
    delayed, now = timeline.recording().spans
    assert (delayed.step, now.step) == (3, 4)
    assert delayed.queued is not None and delayed.queued < delayed.begin
    assert now.queued == now.begin


def test_threads_record_at_the_same_time_and_nothing_is_lost() -> None:
    timeline = Timeline(0, 2)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            chrome.trace([timeline.recording()])

    def write(number: int) -> None:
        for k in range(300):
            exchange = timeline.queued(f"{number}.{k}", "dense group", "dense", 1)
            with timeline.span(f"{number}.{k}", "compute"):
                exchange.done()

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    recording = timeline.recording()
    names = [(s.lane, s.name) for s in recording.spans]
    wanted = {(lane, f"{n}.{k}") for lane in ("compute", "dense group") for n in range(4) for k in range(300)}
    assert set(names) == wanted and len(names) == len(wanted)
    assert recording.dropped == 0 and not any(s.args for s in recording.spans)


def test_the_oldest_give_way_and_are_counted() -> None:
    """A run of days must not fill the memory."""
    timeline = Timeline(0, 1, capacity=3)
    for k in range(5):
        with timeline.span(str(k), "compute"):
            pass
    recording = timeline.recording()
    assert [s.name for s in recording.spans] == ["2", "3", "4"] and recording.dropped == 2
    assert "2 earlier spans were dropped" in json.dumps(chrome.trace([recording]))


def test_earlier_steps_can_be_left_out() -> None:
    timeline = Timeline(0, 1)
    for step in (None, 0, 1, 2):
        timeline.at_step(step)
        with timeline.span(f"step {step}", "compute"):
            pass
    assert [s.name for s in timeline.recording(first_step=1).spans] == ["step 1", "step 2"]


def test_recordings_travel_between_processes() -> None:
    timeline = Timeline(0, 1)
    timeline.queued("rows", "sparse group", "rows", 8).done()
    recording = timeline.recording()
    assert pickle.loads(pickle.dumps(recording)) == recording


@pytest.mark.parametrize("recorder", [Timeline(0, 1), Profiled()])
def test_torch_s_profiler_shows_the_spans_with_and_without_a_trace(recorder: Timeline | Profiled) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        recorder.at_step(1)
        recorder.in_background()
        with recorder.queued_at(recorder.moment()), recorder.span("forward", "compute", batch=1):
            torch.ones(1)
    assert "embrace: forward" in {event.key for event in profile.key_averages()}
