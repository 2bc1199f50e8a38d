"""Ranks that wait for each other's files, in one process; stopped processes are in `tests/faults`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from lightning_embrace.comm.control import Control, Hub, RankFailedError
from lightning_embrace.comm.meeting import Attendance

N = 3
SOON = 10.0  # generous, for machines under load: reached only by a test that fails


@pytest.fixture
def ranks() -> Iterator[list[Control]]:
    hub = Hub(N)
    controls = [Control(0, N, hub=hub), *(Control(rank, N, port=hub.port, token=hub.token) for rank in (1, 2))]
    yield controls
    for control in reversed(controls):
        control.close()
    hub.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(N) as pool:
        yield pool


def gather(
    pool: ThreadPoolExecutor, controls: list[Control], timeout: float = SOON, what: str = "writing"
) -> list[Future[Any]]:
    return [pool.submit(control.gather, [control.rank, "said"], what, timeout) for control in controls]


def test_words_come_by_rank_round_after_round(ranks: list[Control], pool: ThreadPoolExecutor) -> None:
    """Whoever comes first, and however often."""
    for order in (ranks, ranks[::-1], ranks[1:] + ranks[:1]):
        for future in gather(pool, order):
            assert future.result(SOON) == [[0, "said"], [1, "said"], [2, "said"]]


def test_one_rank_hears_itself() -> None:
    assert Control(0, 1).gather([7], "writing", 0.0) == [[7]]


def test_a_slow_rank_is_waited_for_beyond_the_timeout(ranks: list[Control], pool: ThreadPoolExecutor) -> None:
    """Its process is alive: it answers, and comes after ten times what an exchange may take."""
    early = gather(pool, ranks[:2], timeout=0.2)
    time.sleep(2.0)
    assert not any(future.done() for future in early)
    late = gather(pool, ranks[2:])
    assert all(len(future.result(SOON)) == N for future in early + late)


def test_a_process_that_does_not_answer_is_named(
    ranks: list[Control], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both others raise after twice the timeout; the one that is slow and answers is not named."""
    monkeypatch.setattr(ranks[1]._meeting, "hear", lambda message: None)
    begun = time.monotonic()
    for future in gather(pool, [ranks[0], ranks[2]], timeout=0.5):
        with pytest.raises(RuntimeError, match=r"^Rank 1 has not come to 'writing', and not answered for 0.5 s"):
            future.result(SOON)
    assert time.monotonic() - begun >= 1.0  # never before that: it may be slow


def test_without_the_hub_rank_0_is_named(
    ranks: list[Control], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process stops the hub, and nobody's answer arrives."""
    monkeypatch.setattr(Attendance, "answers", lambda *_: [])
    for future in gather(pool, ranks[1:], timeout=0.3):
        with pytest.raises(RuntimeError, match=r"^Rank 0 has not come"):
            future.result(SOON)


def test_a_failure_ends_the_wait(ranks: list[Control], pool: ThreadPoolExecutor) -> None:
    """However long the timeout is."""
    waiting = gather(pool, ranks[1:], timeout=3600.0)
    threading.Timer(0.2, ranks[0].report, [ValueError("boom")]).start()
    for future in waiting:
        with pytest.raises(RankFailedError, match=r"rank 0 failed .*boom"):
            future.result(SOON)


def test_different_meetings_are_told_apart(ranks: list[Control], pool: ThreadPoolExecutor) -> None:
    """Two ranks that read do not take the word of one that writes."""
    futures = gather(pool, ranks[:2], what="reading") + gather(pool, ranks[2:], what="writing")
    for future in futures:
        with pytest.raises(RuntimeError, match="rank 0: reading, rank 1: reading, rank 2: writing"):
            future.result(SOON)
