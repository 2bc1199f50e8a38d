"""Ctrl-C leaves every task such that it can go on, exactly."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_embrace.fleet.stopping import StopSignals
from tests.fleet import zoo
from tests.fleet.runs import assert_as_plain, assert_nothing_left, fleet_of


def when(ready: Callable[[], bool], number: int) -> None:
    """Sends this process a signal, from a thread of its own."""

    def wait() -> None:
        while not ready():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


def has_lines(path: Path, count: int) -> bool:
    return path.exists() and len(path.read_text().splitlines()) >= count


def states(folder: Path) -> dict[str, str]:
    return {name: entry["state"] for name, entry in json.loads((folder / "fleet.json").read_text())["tasks"].items()}


def test_ctrl_c_amid_an_epoch(tmp_path: Path) -> None:
    """A task ends at its batch's end, with a checkpoint; a second Ctrl-C ends one that does not; nothing is left.

    Later all go on, exactly: with loaders that know nothing of where they were.
    """
    folder = tmp_path / "fleet"
    tasks = [zoo.task(0, extra=(zoo.Slow(),)), zoo.task(1, extra=(zoo.At(3, "hang", tmp_path / "hung"),))]
    fleet = fleet_of(tasks, folder, memory="120KiB")
    at = folder / "task 0" / zoo.LOSSES
    when(lambda: has_lines(at, 11) and (tmp_path / "hung").exists(), signal.SIGINT)
    when(lambda: (folder / "fleet.json").exists() and states(folder)["task 0"] == "interrupted", signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match=r"fit\(resume=True\) goes on"):
        fleet.fit()
    assert states(folder) == {"task 0": "interrupted", "task 1": "interrupted"}
    step = torch.load(folder / "task 0" / "last.ckpt", weights_only=True)["global_step"]
    assert step % 8 and not (folder / "task 1" / "last.ckpt").exists()
    assert_nothing_left(folder)
    again = fleet_of(tasks, folder, memory="120KiB")
    assert [r.error for r in again.fit(resume=True)] == [None] * 2
    assert_as_plain(again, list(again.tasks), tmp_path / "plain")
    assert f"{step} " not in at.read_text().split(f"{step + 1} ", 1)[1], "a step was made twice"


def test_signals_are_given_back() -> None:
    """Inside they are counted, outside they are what they were."""
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.count == 2
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
