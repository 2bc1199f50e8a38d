"""Waiting for work items, played by stand-ins: on a CUDA stream, where their own wait returns at once; in slices."""

from __future__ import annotations

import pytest

from lightning_embrace.comm.control import Control, RankFailedError
from lightning_embrace.comm.torch_backend import ExchangeError, wait_for


class Work:
    """A work item of NCCL that is complete after some looks."""

    def __init__(self, looks: float, error: str | None = None) -> None:
        self.looks, self.error = looks, error
        self.ordered = 0

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.ordered += 1
        if self.error:
            raise RuntimeError(self.error)


class Failing(Control):
    """A control channel that learns of rank 1's failure at the n-th look."""

    def __init__(self, looks: int) -> None:
        super().__init__(0, 1)
        self.looks = looks

    def check(self) -> None:
        self.looks -= 1
        if self.looks < 0:
            raise RankFailedError(1, 3, "round 0", "ValueError: no")


def test_the_end_is_awaited_and_the_streams_are_ordered() -> None:
    work = Work(looks=5)
    wait_for(work, Control(0, 1), "rows", on_stream=True)
    assert (work.looks, work.ordered) == (-1, 1)


def test_a_rank_that_never_comes_is_named() -> None:
    """`wait` would return at once, and reading the result hang in CUDA, where no Python code is reached."""
    work = Work(looks=float("inf"))
    with pytest.raises(RankFailedError, match="rank 1 failed"):
        wait_for(work, Failing(3), "rows", on_stream=True)
    assert work.ordered == 0  # nothing waits for it on the stream either


def test_what_was_aborted_is_no_result() -> None:
    """An abort completes the work item: with what happens to be in the buffer."""
    with pytest.raises(RankFailedError, match="rank 1 failed"):
        wait_for(Work(looks=0), Failing(0), "rows", on_stream=True)


def test_an_error_without_a_reason() -> None:
    with pytest.raises(ExchangeError, match="'rows' failed and no rank reported why: unhandled cuda error"):
        wait_for(Work(looks=1, error="unhandled cuda error"), Control(0, 1), "rows", on_stream=True)


class Sliced:
    """A work item of gloo: the first slice of waiting ends without it, and right then it is complete."""

    def __init__(self, slices: int, error: str | None = None) -> None:
        self.slices, self.error = slices, error

    def is_completed(self) -> bool:
        return self.slices <= 0

    def wait(self, slice: object = None) -> None:
        self.slices -= 1
        if slice is not None:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


def test_an_exchange_that_is_done_as_its_slice_ends_is_done() -> None:
    """It was taken for failed once, now and then: the slice's own error was raised."""
    wait_for(Sliced(3), Control(0, 1), "rows")


def test_an_exchange_that_fails_as_its_slice_ends_says_why() -> None:
    with pytest.raises(ExchangeError, match="Connection closed by peer"):
        wait_for(Sliced(3, "Connection closed by peer"), Control(0, 1), "rows")


def test_between_slices_another_rank_s_failure_is_raised() -> None:
    with pytest.raises(RankFailedError, match="rank 1 failed"):
        wait_for(Sliced(10**9), Failing(5), "rows")
