"""A thread of C++ that nobody saves: the process lives on while that is asked for, and aborts otherwise."""

from __future__ import annotations

import ctypes
import functools
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_embrace.comm.horovod_abort import abort_averted
from tests.faults.world import End, World


def throw_in_thread() -> None:
    """What C++ calls when nobody catches an exception."""
    threading.Thread(target=ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev, daemon=True).start()


def inside() -> None:
    with abort_averted() as thrown:
        throw_in_thread()
        assert thrown.wait(30.0)
        thrown.clear()
        throw_in_thread()  # a second one
        assert thrown.wait(30.0)


def after_it_raised() -> None:
    try:
        with abort_averted() as thrown:
            raise KeyError
    except KeyError:
        throw_in_thread()
    assert thrown.wait(30.0)


def after_it_went_well() -> None:
    with abort_averted():
        pass
    throw_in_thread()
    threading.Event().wait(30.0)


def end_of(function: Callable[[], None], folder: Path) -> End:
    world = World(folder, 1, functools.partial(function))
    try:
        return world.ends()[0]
    finally:
        world.clear()


@pytest.mark.parametrize("function", [inside, after_it_raised])
def test_the_process_lives_on(function: Callable[[], None], tmp_path: Path) -> None:
    """The one that waits is told; after a failure a thread may throw late, while the process is ending."""
    end = end_of(function, tmp_path)
    assert (end.code, end.last_line) == (0, "returned"), end.output


def test_afterwards_it_aborts_as_ever(tmp_path: Path) -> None:
    """A fault of someone else's must not become silence."""
    assert end_of(after_it_went_well, tmp_path).code == -signal.SIGABRT
