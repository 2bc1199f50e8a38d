"""The control channel between processes that are killed, stopped and starved."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from lightning_embrace.comm.control import Control, Hub

N = 3
PATIENCE = 60.0  # for machines under load: reached only by a test that fails

# Fresh processes as with spawn, but forked from a clean one that has imported torch and lightning once for all tests.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["lightning_embrace.comm.control"])


def run_rank(rank: int, pipe: Connection, stderr: str, behave: Callable[[int, Control, Connection], None]) -> None:
    sys.stderr = open(stderr, "w")  # noqa: SIM115 - it stays open as long as the process
    hub = Hub(N) if rank == 0 else None
    if hub is not None:
        pipe.send((hub.port, hub.token))
    port, token = pipe.recv()
    control = Control(rank, N, port=port, token=token, hub=hub)
    control.at_step(3)
    control.at("rows (round 2)")
    pipe.send("ready")
    behave(rank, control, pipe)


def learn(rank: int, control: Control, pipe: Connection) -> None:
    """Waits for a failure, says when it was known, and leaves."""
    failure = control.wait_for_failure(PATIENCE)
    pipe.send((time.monotonic(), None if failure is None else failure.rank, str(failure)))
    control.close()


def learn_with_worker(rank: int, control: Control, pipe: Connection) -> None:
    worker = os.fork()
    if worker == 0:  # like a data loader's worker: it outlives its parent by some seconds
        time.sleep(PATIENCE)
        os._exit(0)
    pipe.send(worker)
    learn(rank, control, pipe)


def fail(rank: int, control: Control, pipe: Connection) -> None:
    """The rank that is told to fail raises, reports and is gone at once; the others learn."""
    if pipe.recv() != rank:
        learn(rank, control, pipe)
        return
    try:
        raise ValueError("boom")
    except ValueError as error:
        control.report(error)
    os._exit(1)


def last(rank: int, control: Control, pipe: Connection) -> None:
    """Goes on until told to end, rank 2 meanwhile with the interpreter lock held, and says what it knows then."""
    if rank == 2:
        ctypes.PyDLL(None).sleep(4)
    pipe.recv()
    pipe.send(str(control.failure))
    control.close()


class Ranks:
    """N processes, each with a pipe to the test."""

    def __init__(self, folder: Path, behave: Callable[[int, Control, Connection], None]) -> None:
        self.stderr = [folder / f"stderr-{rank}" for rank in range(N)]
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(N):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=run_rank, args=(rank, theirs, str(self.stderr[rank]), behave))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        address = self.hear(0)
        self.tell(range(N), address)
        for rank in range(N):
            assert self.hear(rank) == "ready"

    def hear(self, rank: int) -> Any:
        assert self.pipes[rank].poll(PATIENCE), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def tell(self, ranks: Any, message: object) -> None:
        for rank in ranks:
            self.pipes[rank].send(message)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        os.kill(self.processes[rank].pid, number)
        return time.monotonic()

    def ended(self) -> list[int | None]:
        for process in self.processes:
            process.join(PATIENCE)
        return [process.exitcode for process in self.processes]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    started: list[Ranks] = []

    def start(behave: Callable[[int, Control, Connection], None]) -> Ranks:
        ranks = object.__new__(Ranks)
        started.append(ranks)  # before it is complete, so that a failing start leaves nothing behind either
        ranks.__init__(tmp_path, behave)  # type: ignore[misc]
        return ranks

    yield start
    for ranks in started:
        for process in ranks.processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("behave", [learn, learn_with_worker])
def test_a_killed_rank_is_named_within_3_seconds(
    start: Callable[..., Ranks], dead: int, behave: Callable[[int, Control, Connection], None]
) -> None:
    """kill -9 leaves no time for a word, and gloo's own error names an address at best.

    Rank 0 is no exception though it has the hub, and neither is a rank whose data loader workers live on: a forked
    copy of the socket once open, nobody sees the end-of-file.
    """
    ranks = start(behave)
    workers = [ranks.hear(rank) for rank in range(N)] if behave is learn_with_worker else []
    try:
        killed = ranks.kill(dead)
        for rank in {0, 1, 2} - {dead}:
            known, named, message = ranks.hear(rank)
            assert named == dead
            assert known - killed < 3.0
            assert message == (
                f"rank {dead} died (its process ended without a word) "
                "while this rank was at step 3, in or after exchange 'rows (round 2)'"
            )
            assert ranks.stderr[rank].read_text() == f"[lightning_embrace] rank {rank}: {message}\n"
        assert ranks.ended() == [-signal.SIGKILL if rank == dead else 0 for rank in range(N)]
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_reports_and_exits_is_heard(start: Callable[..., Ranks], failing: int) -> None:
    """The report is out before the process ends, so the others get its reason instead of a mere death."""
    ranks = start(fail)
    ranks.tell(range(N), failing)
    for rank in {0, 1, 2} - {failing}:
        _, named, message = ranks.hear(rank)
        assert named == failing
        assert message == f"rank {failing} failed at step 3, in or after exchange 'rows (round 2)': ValueError: boom"
        assert ranks.stderr[rank].read_text() == f"[lightning_embrace] rank {rank}: {message}\n"
    assert ranks.ended() == [1 if rank == failing else 0 for rank in range(N)]


def test_slow_ranks_are_not_dead(start: Callable[..., Ranks]) -> None:
    """Stopped for seconds, or holding the interpreter lock: on a noisy machine that is nobody's failure."""
    ranks = start(last)
    for rank in (0, 1):
        ranks.kill(rank, signal.SIGSTOP)
    time.sleep(5)
    for rank in (0, 1):
        ranks.kill(rank, signal.SIGCONT)
    ranks.tell(range(N), "enough")
    assert [ranks.hear(rank) for rank in range(N)] == ["None"] * N
    assert ranks.ended() == [0] * N
    assert [path.read_text() for path in ranks.stderr] == [""] * N
