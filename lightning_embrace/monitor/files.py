"""From timelines to trace files: one for all ranks at an orderly end, one per rank after a failure."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_embrace.monitor import chrome
from lightning_embrace.monitor.span import Recording
from lightning_embrace.monitor.timeline import Timeline

#: gives rank 0 what every rank passed in, by rank, and None to the others
Gather = Callable[[Recording], Sequence[Recording] | None]


def part_path(path: str | os.PathLike[str], rank: int) -> Path:
    """Where a rank writes what it has seen when it cannot be gathered: ``trace.json`` → ``trace.rank3.json``."""
    path = Path(path)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def horovod_path(path: str | os.PathLike[str]) -> Path:
    """Where Horovod writes its own timeline, beside ours, in a folder that is there: ``trace.horovod.json``."""
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f"{path.stem}.horovod{path.suffix}")


def write_together(path: str | os.PathLike[str], timeline: Timeline, gather: Gather) -> None:
    """Writes one trace of all ranks, on rank 0. Collective.

    Args:
        path: Where to.
        timeline: This rank's.
        gather: A collective.
    """
    recordings = gather(timeline.recording())
    if recordings is not None:
        chrome.write(path, chrome.trace(recordings))


def write_part(path: str | os.PathLike[str], timeline: Timeline) -> Path:
    """Writes this rank's trace alone; it opens as it is. Merge several with :func:`chrome.merge`. Not collective.

    Args:
        path: The path of the whole trace.
        timeline: This rank's.

    Returns:
        Where it was written.
    """
    part = part_path(path, timeline.rank)
    chrome.write(part, chrome.trace([timeline.recording()]))
    return part


def remove_part(path: str | os.PathLike[str], rank: int) -> None:
    """Removes what this rank left there when an earlier run failed. Not collective."""
    part_path(path, rank).unlink(missing_ok=True)
