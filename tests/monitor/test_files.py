"""Where traces are written: whole at an orderly end, in parts after a failure."""

from __future__ import annotations

from pathlib import Path

from lightning_embrace.monitor import chrome
from lightning_embrace.monitor.files import part_path, remove_part, write_part, write_together
from lightning_embrace.monitor.span import Recording
from lightning_embrace.monitor.timeline import Timeline


def timeline(rank: int) -> Timeline:
    recorded = Timeline(rank, 2)
    with recorded.span(f"forward of {rank}", "compute"):
        pass
    return recorded


def test_rank_0_alone_writes_what_was_gathered(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    both = [timeline(0), timeline(1)]
    gathered = [t.recording() for t in both]
    write_together(path, both[1], lambda mine: None)
    assert not path.exists()
    passed: list[Recording] = []
    write_together(path, both[0], lambda mine: passed.append(mine) or gathered)
    assert passed == gathered[:1]
    assert {e["name"] for e in chrome.read(path)["traceEvents"] if e["ph"] == "X"} == {"forward of 0", "forward of 1"}


def test_parts_open_as_they_are_and_merge_to_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.1.json"
    both = [timeline(0), timeline(1)]
    parts = [write_part(path, t) for t in both]
    assert parts == [tmp_path / "run.1.rank0.json", tmp_path / "run.1.rank1.json"]
    assert chrome.merge([chrome.read(p) for p in parts]) == chrome.trace([t.recording() for t in both])
    remove_part(path, 1)
    remove_part(path, 1)
    assert parts[0].exists() and not parts[1].exists()


def test_a_path_without_a_suffix(tmp_path: Path) -> None:
    assert part_path(tmp_path / "trace", 2) == tmp_path / "trace.rank2"
