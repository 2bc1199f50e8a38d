"""What the ranks make of each other's outcomes."""

from __future__ import annotations

import pytest

from lightning_embrace.checkpoint.agreement import (
    CheckpointError,
    Part,
    read_together,
    speaker,
    why_not_read,
    why_not_written,
    write_together,
)

DONE, NOTHING, MISSING, FAILED = Part


@pytest.mark.parametrize(
    ("parts", "prints", "speaks", "error", "message"),
    [
        ([DONE] * 3, [5] * 3, None, None, ""),
        ([NOTHING] * 3, [0] * 3, None, None, ""),
        ([MISSING] * 3, [0] * 3, 0, FileNotFoundError, "Checkpoint file not found: a.ckpt"),
        (
            [DONE, MISSING, MISSING],
            [5, 0, 0],
            1,
            FileNotFoundError,
            "not found on ranks 1, 2: a.ckpt. Every rank reads it: keep checkpoints in a folder that all ranks see",
        ),
        ([NOTHING, DONE, NOTHING], [0, 5, 0], 1, CheckpointError, "Rank 1 is to go on from a.ckpt"),
        ([NOTHING, MISSING, NOTHING], [0] * 3, 1, CheckpointError, "and ranks 0, 2 from no checkpoint"),
        ([DONE, FAILED, DONE], [5, 0, 5], 1, CheckpointError, "a.ckpt cannot be read on rank 1: it says"),
        ([DONE, FAILED, MISSING], [5, 0, 0], 2, FileNotFoundError, "on rank 2: a.ckpt"),
        ([DONE] * 3, [5, 5, 6], 0, CheckpointError, "rank 2 found at a.ckpt is another checkpoint than rank 0's"),
    ],
)
def test_why_not_read(parts, prints, speaks, error, message) -> None:
    assert speaker(parts, prints) == speaks
    verdict = why_not_read(parts, prints, "a.ckpt", "it says")
    if error is None:
        assert verdict is None
    else:
        assert type(verdict) is error and message in str(verdict), verdict


def test_why_not_written() -> None:
    text = str(why_not_written("a.ckpt", [DONE, FAILED, FAILED], "OSError: disk full.", "b.ckpt"))
    assert text == (
        "The checkpoint a.ckpt could not be written on ranks 1, 2: OSError: disk full. The last whole one is b.ckpt."
    )


def alone(words, what):
    return [words]


def test_one_rank_alone() -> None:
    """It has the same errors, with the cause behind them, and what is not an error passes."""

    def fail():
        raise OSError(28, "No space left on device")

    assert read_together(alone, "a.ckpt", lambda: ("content", 5)) == "content"
    with pytest.raises(CheckpointError, match=r"a.ckpt could not be written: OSError: .*No space left") as info:
        write_together(alone, "a.ckpt", fail, None)
    assert isinstance(info.value.__cause__, OSError)
    with pytest.raises(CheckpointError, match=r"cannot be read on rank 0: OSError: .*No space left"):
        read_together(alone, "a.ckpt", fail)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_together(alone, "a.ckpt", interrupt, None)
