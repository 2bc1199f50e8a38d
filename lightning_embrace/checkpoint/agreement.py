"""What one rank cannot read or write is one error on every rank, before any of them goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

from lightning_embrace.comm.control import RankFailedError
from lightning_embrace.comm.torch_backend import ExchangeError

T = TypeVar("T")

#: characters of paths and errors that all ranks together tell: they travel in one small frame
_TOLD = 12_000
_MOST = 2000
#: an exchange has ended so: the others do not come, or have heard of it
_BROKEN = (ExchangeError, RankFailedError)
_SHARED = "Every rank reads it: keep checkpoints in a folder that all ranks see, on every machine."

#: tells all ranks a few words and returns theirs, however long they take: see `comm.meeting`
Gather = Callable[[list[int | str], str], list[list[Any]]]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written. Raised on every rank, whichever of them it was."""


class Part(IntEnum):
    """What has become of one rank's part."""

    DONE = 0
    NOTHING = 1
    MISSING = 2
    FAILED = 3


def read_together(gather: Gather, path: str, read: Callable[[], tuple[T, int]]) -> T:
    """Reads a checkpoint, on all ranks or on none. Collective.

    Args:
        gather: Carries the outcomes.
        path: The checkpoint, for errors.
        read: Returns what this rank has read, and a number that is equal where the same was read.

    Returns:
        What this rank has read.

    Raises:
        FileNotFoundError: A rank does not find it.
        CheckpointError: A rank cannot read it, has read something else, or wants to read nothing.
    """
    value, print_ = None, 0
    error: Exception | None = None
    try:
        value, print_ = read()
        part = Part.DONE
    except _BROKEN:
        raise
    except FileNotFoundError as caught:
        error, part = caught, Part.MISSING
    except Exception as caught:
        error, part = caught, Part.FAILED
    _agree_on_reading(gather, path, part, print_, error)
    return value  # type: ignore[return-value]


def read_nothing(gather: Gather) -> None:
    """Takes the part of a rank that has no checkpoint to read, in the others' :func:`read_together`. Collective.

    Raises:
        CheckpointError: Another rank has one.
    """
    _agree_on_reading(gather, "", Part.NOTHING, 0, None)


def write_together(gather: Gather, path: str, write: Callable[[], T], last: str | None) -> T:
    """Writes a checkpoint. Returns when every rank has written its part. Collective.

    Args:
        gather: Carries the outcomes.
        path: The checkpoint, for errors.
        write: Writes this rank's part, if it has one.
        last: The last whole checkpoint, for errors.

    Returns:
        What ``write`` has returned here.

    Raises:
        CheckpointError: A rank could not write it.
    """
    value, error = None, None
    try:
        value = write()
    except _BROKEN:
        raise
    except Exception as caught:
        error = caught
    what = "writing a checkpoint"
    parts = [Part(part) for [part] in gather([Part.FAILED if error else Part.DONE], what)]
    if Part.FAILED in parts:
        [text] = gather([_said(error, len(parts))], what)[parts.index(Part.FAILED)]
        raise why_not_written(path, parts, text, last) from error
    return value  # type: ignore[return-value]


def why_not_read(parts: Sequence[Part], prints: Sequence[int], path: str, text: str) -> Exception | None:
    """What is wrong when the ranks have read a checkpoint, if anything is.

    Args:
        parts: By rank, what became of its part.
        prints: By rank, a number that is equal where the same was read.
        path: What the :func:`speaker` was to read.
        text: What it says.

    Returns:
        The error that every rank raises, or None.
    """
    rank = speaker(parts, prints)
    if rank is None:
        return None
    nothing = _ranks(parts, Part.NOTHING)
    if nothing:
        return CheckpointError(
            f"Rank {rank} is to go on from {path}, and {_named(nothing)} from no checkpoint: it is not there, or not"
            f" told of it. Give every rank the same `ckpt_path`. {_SHARED}"
        )
    missing = _ranks(parts, Part.MISSING)
    if len(missing) == len(parts):
        return FileNotFoundError(f"Checkpoint file not found: {path}")
    if missing:
        return FileNotFoundError(f"Checkpoint file not found on {_named(missing)}: {path}. {_SHARED}")
    failed = _ranks(parts, Part.FAILED)
    if failed:
        return CheckpointError(f"The checkpoint {path} cannot be read on {_named(failed)}: {text}")
    others = [r for r, number in enumerate(prints) if number != prints[0]]
    return CheckpointError(f"What {_named(others)} found at {path} is another checkpoint than rank 0's. {_SHARED}")


def speaker(parts: Sequence[Part], prints: Sequence[int]) -> int | None:
    """The rank that says what is wrong.

    Args:
        parts: By rank, what became of its part.
        prints: By rank, a number that is equal where the same was read.

    Returns:
        The rank, None: nothing is wrong.
    """
    nothing = _ranks(parts, Part.NOTHING)
    if nothing:
        return next((rank for rank, part in enumerate(parts) if part != Part.NOTHING), None)
    for kind in (Part.MISSING, Part.FAILED):
        if kind in parts:
            return parts.index(kind)
    return 0 if len(set(prints)) > 1 else None


def why_not_written(path: str, parts: Sequence[Part], text: str, last: str | None) -> CheckpointError:
    """The error that every rank raises when some could not write their parts of a checkpoint.

    Args:
        path: The checkpoint.
        parts: By rank, what became of its part.
        text: What the first rank that failed says.
        last: The last whole checkpoint.

    Returns:
        The error.
    """
    failed = _ranks(parts, Part.FAILED)
    kept = f"The last whole one is {last}." if last else "No other was written before it."
    return CheckpointError(
        f"The checkpoint {path} could not be written{_where(failed, parts)}: {text.rstrip('.')}. {kept}"
    )


def _agree_on_reading(gather: Gather, path: str, part: Part, print_: int, error: Exception | None) -> None:
    what = "reading a checkpoint"
    said = gather([part, print_], what)
    parts, prints = [Part(kind) for kind, _ in said], [number for _, number in said]
    rank = speaker(parts, prints)
    if rank is not None:
        path, text = gather([path, _said(error, len(parts))], what)[rank]
        verdict = why_not_read(parts, prints, path, text)
        assert verdict is not None
        raise verdict from error


def _said(error: Exception | None, world_size: int) -> str:
    if error is None:
        return ""
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return text[: min(_MOST, _TOLD // world_size)]


def _ranks(parts: Sequence[int], kind: Part) -> list[int]:
    return [rank for rank, part in enumerate(parts) if part == kind]


def _where(ranks: Sequence[int], parts: Sequence[Part]) -> str:
    return f" on {_named(ranks)}" if len(parts) > 1 else ""


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
