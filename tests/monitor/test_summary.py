"""What a step's waiting and overlap amount to."""

from __future__ import annotations

import pytest

from lightning_embrace.monitor.span import Span
from lightning_embrace.monitor.summary import summarise

SECOND = 10**9


def span(lane: str, begin: float, end: float, step: int = 1, nbytes: int | None = None, **args: str) -> Span:
    return Span("x", lane, int(begin * SECOND), int(end * SECOND), step, nbytes=nbytes, args=args)  # type: ignore[arg-type]


def test_a_step_without_waiting_is_wholly_hidden() -> None:
    summary = summarise([span("compute", 0, 10), span("dense group", 2, 6, nbytes=80)], 1)
    assert (summary.waiting, summary.exposed, summary.sent) == ({}, 0.0, {"dense group": 80})
    assert (summary.in_flight, summary.hidden, summary.overlap) == (4.0, 4.0, 1.0)


def test_compute_that_waits_hides_nothing() -> None:
    """Look-ups wait inside the forward pass: its span alone would call them hidden."""
    spans = [
        span("compute", 0, 10),
        span("sparse group", 2, 6, nbytes=8),
        span("waiting", 3, 6, group="sparse group"),
    ]
    summary = summarise(spans, 1)
    assert summary.waiting == {"sparse group": 3.0} and summary.exposed == 3.0
    assert (summary.hidden, summary.overlap) == (1.0, 0.25)


def test_an_exchange_that_runs_behind_the_next_step_is_hidden_by_its_compute() -> None:
    spans = [
        span("compute", 0, 5),
        span("dense group", 4, 9, nbytes=8),
        span("compute", 6, 12, step=2),
        span("sparse group", 6, 7, step=2, nbytes=16),
        span("waiting", 8, 9, step=2, group="dense group"),
    ]
    first, second = summarise(spans, 1), summarise(spans, 2)
    assert first.in_flight == 5.0 and first.hidden == 1.0 + 2.0
    assert first.waiting == {} and second.waiting == {"dense group": 1.0}  # it is the later step that stood still
    assert (first.sent, second.sent) == ({"dense group": 8}, {"sparse group": 16})
    assert second.overlap == 1.0


def test_exchanges_in_flight_together_count_once() -> None:
    spans = [span("dense group", 0, 4), span("sparse group", 2, 6), span("compute", 1, 3)]
    summary = summarise(spans, 1)
    assert (summary.in_flight, summary.hidden) == (6.0, 2.0)


def test_two_threads_that_wait_together_stop_the_step_once() -> None:
    spans = [span("waiting", 0, 4, group="dense group"), span("waiting", 2, 6, group="sparse group")]
    summary = summarise([*spans, span("waiting", 7, 8)], 1)
    assert summary.waiting == {"dense group": 4.0, "sparse group": 4.0, "other": 1.0}
    assert summary.exposed == 7.0


def test_a_step_that_exchanged_nothing_has_nothing_to_hide() -> None:
    summary = summarise([], 1)
    assert summary.overlap == 1.0 and summary.in_flight == 0.0


def test_metrics_are_numbers_by_name() -> None:
    spans = [span("compute", 0, 4), span("dense group", 2, 6, nbytes=8), span("waiting", 4, 6, group="dense group")]
    assert summarise(spans, 1).metrics() == pytest.approx(
        {
            "seconds waiting for dense group": 2.0,
            "seconds exposed": 2.0,
            "bytes sent on dense group": 8.0,
            "seconds in flight": 4.0,
            "overlap": 0.5,
        }
    )
