"""A traced communicator is the one it traces, for everybody but the timeline."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_embrace.comm.base import Communicator, LocalCommunicator
from lightning_embrace.comm.fake import TwinCommunicator
from lightning_embrace.comm.traced import TracedCommunicator
from lightning_embrace.comm.traffic import Traffic
from lightning_embrace.monitor.span import Span
from lightning_embrace.monitor.timeline import Timeline


def every_exchange(comm: Communicator) -> list[Tensor]:
    n = comm.world_size
    handles = [
        comm.gather(torch.arange(3), "header"),
        comm.all_to_all(torch.arange(2.0 * n), [2] * n, [2] * n, "rows", "rows"),
        comm.all_to_all(torch.arange(2.0 * n), [2] * n, [2] * n, "grads", "delayed rows", low_priority=True),
        comm.all_reduce(torch.ones(8), "dense", "block", low_priority=True),
        comm.all_reduce(torch.ones(8), "replicated", "small table"),
        comm.broadcast(torch.ones(8), "buffers", "buffers"),
    ]
    return [handle.wait() for handle in handles]


def traced(inner: Communicator) -> tuple[TracedCommunicator, Timeline]:
    timeline = Timeline(inner.rank, inner.world_size)
    return TracedCommunicator(inner, timeline), timeline


def exchanges(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.recording().spans if span.is_exchange]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(LocalCommunicator, id="one rank"),
        pytest.param(lambda: TwinCommunicator(3, 0), id="rank 0 of 3"),
        pytest.param(lambda: TwinCommunicator(3, 2), id="rank 2 of 3"),
    ],
)
def test_results_and_counts_are_those_of_the_inner_one(make: Callable[[], Communicator]) -> None:
    plain, inner = make(), make()
    comm, _ = traced(inner)
    comm.at_step(4)
    comm.give_way(0.0)
    for ours, theirs in zip(every_exchange(comm), every_exchange(plain), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert vars(inner.traffic) == vars(plain.traffic)
    assert getattr(inner, "events", None) == getattr(plain, "events", None)
    assert (comm.rank, comm.world_size, comm.device) == (plain.rank, plain.world_size, plain.device)


@pytest.mark.parametrize("rank", [0, 1])
def test_bytes_are_counted_as_the_traffic_is(rank: int) -> None:
    inner = TwinCommunicator(3, rank)
    comm, timeline = traced(inner)
    every_exchange(comm)
    spans = exchanges(timeline)
    assert {s.kind: s.nbytes for s in spans} == dict(inner.traffic.sent)
    assert {s.kind: s.args["received"] for s in spans} == dict(inner.traffic.received)


def test_lanes_are_the_groups_that_carry_the_exchanges() -> None:
    comm, timeline = traced(TwinCommunicator(2, 0))
    comm.at_step(5)
    every_exchange(comm)
    assert {s.name: s.lane for s in exchanges(timeline)} == {
        "header": "sparse group",
        "rows": "sparse group",
        "delayed rows": "dense group",
        "block": "dense group",
        "small table": "sparse group",
        "buffers": "sparse group",
    }
    waits = [s for s in timeline.recording().spans if s.lane == "waiting"]
    assert {s.name: s.args["group"] for s in waits} == {f"wait {s.name}": s.lane for s in exchanges(timeline)}
    assert {s.step for s in timeline.recording().spans} == {5}


def test_counters_given_later_and_what_only_the_inner_one_has() -> None:
    """The strategy keeps one set of counters over several fits, and closes what it has opened."""
    inner = TwinCommunicator(2, 0)
    comm, _ = traced(inner)
    counters = Traffic()
    comm.traffic = counters
    comm.all_reduce(torch.ones(8), "dense", "block").wait()
    assert inner.traffic is counters and comm.traffic is counters and counters.calls == {"dense": 1}
    assert comm.events is inner.events
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = comm.nothing


class Telling:
    """A handle that tells when it starts and ends, which is before anybody waits for it; or breaks."""

    priority = 3

    def __init__(self, error: Exception | None = None) -> None:
        self.tell: list[Callable[[], None]] = []
        self.error = error

    def when_started(self, callback: Callable[[], None]) -> None:
        self.tell.append(callback)

    def when_done(self, callback: Callable[[], None]) -> None:
        self.tell.append(callback)

    def wait(self) -> Tensor:
        if self.error is not None:
            raise self.error
        return torch.ones(1)


class Scripted(TwinCommunicator):
    """Gives out a handle made beforehand, or cannot even begin."""

    def __init__(self, handle: Telling | Exception) -> None:
        super().__init__()
        self.given = handle

    def all_reduce(self, flat: Tensor, kind: str, what: str, low_priority: bool = False) -> Telling:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


def test_a_handle_that_tells_its_end_is_believed() -> None:
    """An exchange that ends behind compute is awaited later: its end is not that of the waiting."""
    handle = Telling()
    comm, timeline = traced(Scripted(handle))
    pending = comm.all_reduce(torch.ones(1), "dense", "block")
    started, done = handle.tell
    assert exchanges(timeline)[0].args["unfinished"]
    started()
    done()
    (before,) = exchanges(timeline)
    assert before.queued is not None and before.queued < before.begin < before.end
    pending.wait()
    assert exchanges(timeline) == [before]
    assert pending.priority == 3  # type: ignore[attr-defined]  # what only the inner handle has


def test_a_failure_is_the_inner_one_and_is_recorded() -> None:
    error = RuntimeError("rank 1 failed")
    for handle in (Telling(error), error):
        comm, timeline = traced(Scripted(handle))
        with pytest.raises(RuntimeError) as caught:
            comm.all_reduce(torch.ones(1), "dense", "block").wait()
        assert caught.value is error
        (span,) = exchanges(timeline)
        assert span.args["error"] == "RuntimeError: rank 1 failed" and "unfinished" not in span.args
