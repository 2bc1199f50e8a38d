"""The exchanges of real processes, as their merged trace shows them."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_embrace.comm.base import Communicator
from lightning_embrace.comm.connect import Connection
from lightning_embrace.comm.queue import LowPriorityQueue, Slot
from lightning_embrace.comm.traced import TracedCommunicator
from lightning_embrace.monitor import chrome
from lightning_embrace.monitor.files import write_together
from lightning_embrace.monitor.span import Recording
from lightning_embrace.monitor.timeline import Timeline
from tests.monitor.schema import check
from tests.support.ranks import Ranks, become_rank, free_port

STEPS = 3
#: sent by rank 0 and by rank 1 in every step, and the group
SENT = {
    "header": ("sparse group", 16, 16),
    "rows": ("sparse group", 12, 4),
    "gradient rows": ("sparse group", 4, 12),
    "block 0": ("dense group", 4000, 4000),
    "block 1": ("dense group", 8, 8),
    "buffers": ("sparse group", 20, 0),
}


def connect() -> Connection:
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    connection = Connection(rank, world_size, torch.device("cpu"), "gloo", timedelta(seconds=60), "127.0.0.1")
    connection.open_groups()
    return connection


def step(comm: Communicator) -> list[Tensor]:
    """Unequal pieces: rank 0 sends 3 elements where rank 1 sends 1, and back."""
    rank = comm.rank
    forward = ([1, 3], [1, 1]) if rank == 0 else ([1, 1], [3, 1])
    back = ([1, 1], [1, 3]) if rank == 0 else ([3, 1], [1, 1])
    header = comm.gather(torch.arange(2) + rank, "header").wait()
    rows = comm.all_to_all(torch.arange(float(sum(forward[0]))), *forward, "rows", "rows")
    dense = [comm.all_reduce(torch.full((n,), 1.0 + rank), "dense", f"block {b}", True) for b, n in ((0, 1000), (1, 2))]
    grads = comm.all_to_all(torch.arange(float(sum(back[0]))), *back, "grads", "gradient rows")
    buffers = comm.broadcast(torch.full((5,), float(rank)), "buffers", "buffers")
    return [header, *(handle.wait().clone() for handle in (rows, *dense, grads, buffers))]


def gather(mine: Recording) -> list[Recording] | None:
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered)
    return gathered


def train(path: str) -> bool:
    """Whether the traced steps have the results and counts of plain ones."""
    connection = connect()
    plain = connection.communicator
    wanted = step(plain)
    sent = dict(plain.traffic.sent)
    plain.traffic.reset()
    timeline = Timeline(plain.rank, plain.world_size)
    comm = TracedCommunicator(plain, timeline)
    same = True
    for number in range(STEPS):
        comm.at_step(number)
        with timeline.span("step", "compute"):
            same = same and all(map(torch.equal, step(comm), wanted))
    write_together(path, timeline, gather)
    connection.close()
    return same and dict(plain.traffic.sent) == {kind: STEPS * size for kind, size in sent.items()}


def test_both_ranks_exchanges_are_in_the_trace_with_names_bytes_and_groups(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    assert ranks(2).run(train, str(path)) == [True, True]
    trace = chrome.read(path)
    check(trace)
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    for rank in range(2):
        for number in range(STEPS):
            here = [e for e in events if e["pid"] == rank and e["args"]["step"] == number]
            shown = {e["name"]: (e["cat"], e["args"]["bytes"]) for e in here if "bytes" in e["args"]}
            assert shown == {name: (group, both[rank]) for name, (group, *both) in SENT.items()}
            waited = {e["name"]: e["args"]["group"] for e in here if e["cat"] == "waiting"}
            assert waited == {f"wait {name}": group for name, (group, *_) in SENT.items()}
    flights = [e for e in events if "bytes" in e["args"]]
    assert all(e["args"]["queued_us"] >= 0 and e["dur"] > 0 for e in flights)  # done > started >= queued
    assert not any({"unfinished", "error"} & e["args"].keys() for e in events)
    assert_laid_over_each_other(flights)


def assert_laid_over_each_other(flights: list[dict[str, Any]]) -> None:
    """Nobody has the sum before both have begun."""
    for name in ("block 0", "header"):
        for number in range(STEPS):
            both = [e for e in flights if e["name"] == name and e["args"]["step"] == number]
            slack = 1_000  # µs: the two processes read their wall clocks at different instants
            assert max(e["ts"] for e in both) <= min(e["ts"] + e["dur"] for e in both) + slack


def issue_elsewhere() -> list[tuple[str, str, int | None]]:
    """A thread of its own issues and awaits what the training asked for a step before."""
    connection = connect()
    timeline = Timeline(connection.communicator.rank, 2)
    comm = TracedCommunicator(connection.communicator, timeline)
    comm.at_step(0)
    moment = timeline.moment()
    comm.at_step(1)

    def work() -> None:
        timeline.in_background()
        with timeline.queued_at(moment):
            handle = comm.all_reduce(torch.ones(4), "dense", "block", low_priority=True)
        handle.wait()

    thread = threading.Thread(target=work)
    thread.start()
    comm.gather(torch.ones(1, dtype=torch.int64), "header").wait()
    thread.join()
    connection.close()
    return sorted((span.lane, span.name, span.step) for span in timeline.recording().spans)


def test_what_a_background_thread_awaits_is_no_waiting(ranks: Callable[[int], Ranks]) -> None:
    shown = [("dense group", "block", 0), ("sparse group", "header", 1), ("waiting", "wait header", 1)]
    assert ranks(2).run(issue_elsewhere) == [shown, shown]


def end_behind_compute() -> tuple[bool, bool]:
    """An exchange ends while this rank computes, and is awaited only then."""
    connection = connect()
    timeline = Timeline(connection.communicator.rank, 2)
    comm = TracedCommunicator(connection.communicator, timeline)
    handle = comm.all_reduce(torch.ones(4), "dense", "block", low_priority=True)
    deadline = time.monotonic() + 60
    with timeline.span("backward", "compute"):
        while timeline.recording().spans[0].args.get("unfinished") and time.monotonic() < deadline:
            time.sleep(0.001)
    handle.wait()
    connection.close()
    block, backward, wait = timeline.recording().spans
    return block.end < backward.end, block.end < wait.begin


def test_an_exchange_ends_when_it_ends_not_when_it_is_awaited(ranks: Callable[[int], Ranks]) -> None:
    """Else every exchange would seem to last until its wait, and all of them to be hidden behind compute."""
    assert ranks(2).run(end_behind_compute) == [(True, True)] * 2


def fail_with_exchanges_under_way() -> None:
    """A process that ends while a callback is pending in gloo's thread, and another rank that never comes."""
    connection = connect()
    if connection.communicator.rank == 1:
        connection.control.wait_for_failure(60.0)
        connection.abandon()
        return
    timeline = Timeline(0, 2)
    comm = TracedCommunicator(connection.communicator, timeline)
    handles = [comm.all_reduce(torch.ones(1000), "dense", f"block {k}", low_priority=True) for k in range(3)]
    connection.fail(ValueError("boom"))
    connection.abandon()
    assert len(handles) == 3 and all(span.is_exchange for span in timeline.recording().spans)


def test_a_failed_process_ends_in_spite_of_its_pending_exchanges() -> None:
    """Gloo calls back from a thread of its own, which aborts a process that ends before: `abandon` ends them."""
    port = free_port()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_fail_as, args=(rank, port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60.0)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0]


def _fail_as(rank: int, port: int) -> None:
    become_rank(rank, 2, port)
    fail_with_exchanges_under_way()


def through_the_queue() -> list[tuple[str, str, int | None]]:
    """Asked for in step 0, its turn comes in step 1, where the training waits for it."""
    connection = connect()
    timeline = Timeline(connection.communicator.rank, 2)
    comm = TracedCommunicator(connection.communicator, timeline)
    queue = LowPriorityQueue(comm, recorder=timeline)
    slots = [
        Slot(lambda k=k: comm.all_reduce(torch.ones(4), "dense", f"block {k}", low_priority=True), f"block {k}")
        for k in range(2)
    ]
    queue.append(slots)
    comm.at_step(0)
    queue.ready(slots[1])
    comm.at_step(1)
    queue.ready(slots[0])
    assert all(bool((slot.wait() == 2).all()) for slot in slots)
    queue.close()
    connection.close()
    return sorted((span.lane, span.name, span.step) for span in timeline.recording().spans)


def test_the_low_priority_queue_shows_when_it_was_asked_and_who_waited(ranks: Callable[[int], Ranks]) -> None:
    """Its own thread's waiting holds nobody up; the training's does."""
    shown = [("dense group", "block 0", 1), ("dense group", "block 1", 0)]
    shown += [("waiting", "wait block 0", 1), ("waiting", "wait block 1", 1)]
    assert ranks(2).run(through_the_queue) == [shown, shown]
