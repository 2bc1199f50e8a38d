"""Harm under the launchers that start processes themselves: nothing is left of a script that ends early."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.faults.world import Script

ENDLESS = ("--steps", "100000", "--timeout", "900")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    scripts: list[Script] = []

    def start(*arguments: str) -> Script:
        scripts.append(Script(tmp_path, *arguments))
        return scripts[-1]

    yield start
    for script in scripts:
        script.clear()


def test_the_process_that_was_started_is_killed(start: Callable[..., Script]) -> None:
    """Nobody watches the children of a script whose main process is gone; they end by themselves."""
    script = start("--point", "after_lookup", "--kind", "kill", "--rank", "0")
    end = script.end()
    assert end.code == -signal.SIGKILL
    assert script.left() == []
    (note,) = end.notes()
    assert "rank 1: rank 0 died (its process ended without a word)" in note
    assert "[rank1]: lightning_embrace.comm.control.RankFailedError: rank 0 died" in end.output


def test_a_child_process_raises(start: Callable[..., Script]) -> None:
    """The child's own error and the main process's, which names it, are out before Lightning kills all."""
    script = start("--point", "after_lookup", "--kind", "raise", "--rank", "1")
    end = script.end()
    assert end.code not in (0, None)
    assert script.left() == []
    assert "[rank1]: ValueError: harm at after_lookup" in end.output
    assert "RankFailedError: rank 1 failed at step 2, in or after exchange" in end.output


def test_a_spawned_process_raises(start: Callable[..., Script]) -> None:
    """The parent shows the traceback of whichever child ends first, and Lightning tells a child's strategy nothing.

    The child that failed prints its own, so that the line which failed can be found.
    """
    script = start("--start-method", "spawn", "--point", "batch_end", "--kind", "raise", "--rank", "0")
    end = script.end()
    assert end.code == 1
    assert script.left() == []
    assert "ValueError: harm at batch_end" in end.output
    assert "in on_train_batch_end" in end.output
    assert "rank 1: rank 0 failed at step 1, in or after exchange" in end.output


@pytest.mark.parametrize("method", ["popen", "fork"])
def test_the_parent_alone_is_interrupted(start: Callable[..., Script], method: str) -> None:
    """A notebook interrupts its kernel and nobody else; forked ranks once trained on without it."""
    script = start("--start-method", method, *ENDLESS)
    script.await_training(2)
    os.kill(script.process.pid, signal.SIGINT)
    end = script.end()
    assert end.code == 1
    assert script.left() == []
    if method == "popen":
        assert "rank 1: rank 0 failed at step" in end.output and "KeyboardInterrupt" in end.output


def test_sigterm_to_all_processes(start: Callable[..., Script], tmp_path: Path) -> None:
    """``timeout`` and systemd end a job so. All ranks stop after the same step, and a callback can still save.

    Lightning's handler joins a broadcast wherever a rank is, and twice in a child, to which the parent passes the
    signal on; with other collectives under way on the same group that never ended.
    """
    script = start("--save", str(tmp_path / "saved"), *ENDLESS)
    script.await_training(2)
    os.killpg(script.process.pid, signal.SIGTERM)
    end = script.end()
    assert end.code == 0, end.output
    assert script.left() == []
    assert end.notes() == []
    (file,) = (tmp_path / "saved").iterdir()
    saved = torch.load(file, weights_only=True)
    assert saved["state_dict"]["words.weight"].shape == (40, 6)
    assert saved["global_step"] > 0
    steps = {int(state["step"]) for state in saved["optimizer_states"][0]["state"].values()}
    assert steps == {saved["global_step"]}
