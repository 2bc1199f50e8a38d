"""The picture of one step."""

from __future__ import annotations

import builtins
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_embrace.monitor import chrome
from lightning_embrace.monitor.picture import Bar, bars, draw, main
from lightning_embrace.monitor.span import Recording, Span

MS = 10**6
SPANS = (
    Span("old", "dense group", 0, 9 * MS, 2, "dense", 8, 0),
    Span("forward", "compute", 5 * MS, 20 * MS, 3),
    Span("rows", "sparse group", 6 * MS, 8 * MS, 3, "rows", 8, 6 * MS),
    Span("wait rows", "waiting", 6 * MS, 8 * MS, 3),
    Span("block", "dense group", 8 * MS, 30 * MS, 3, "dense", 8, 8 * MS),
    Span("forward", "compute", 21 * MS, 40 * MS, 4),
)
TRACE = chrome.trace([Recording(0, SPANS), Recording(1, SPANS)])


def test_a_step_is_cut_out_with_what_its_neighbours_have_in_flight() -> None:
    assert [bar for bar in bars(TRACE, 3, 2) if bar.rank == 1] == [
        Bar(1, "compute", 0, 0.0, 15.0, "forward", True),
        Bar(1, "sparse group", 0, 1.0, 3.0, "rows", True),
        Bar(1, "dense group", 0, 0.0, 4.0, "old", False),
        Bar(1, "dense group", 1, 3.0, 15.0, "block", True),
        Bar(1, "waiting", 0, 1.0, 3.0, "wait rows", True),
    ]


def test_a_rank_that_is_not_shown_does_not_widen_the_picture() -> None:
    late = tuple(replace(s, begin=s.begin + 900 * MS, end=s.end + 900 * MS, queued=None) for s in SPANS)
    trace = chrome.trace([Recording(0, SPANS), Recording(1, late)])
    assert {bar.rank for bar in bars(trace, 3, 1)} == {0}
    assert max(bar.end for bar in bars(trace, 3, 1)) == 15.0
    assert max(bar.end for bar in bars(trace, 3, 2)) == 915.0


def test_a_step_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ValueError, match="step=9: the trace has steps 3 to 4"):
        bars(TRACE, 9, 2)
    with pytest.raises(ValueError, match="has no steps"):
        bars(chrome.trace([]), 9, 2)


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chrome.write(tmp_path / "trace.json", TRACE)
    usual = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return usual(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-embrace\[examples\]'"):
        draw(tmp_path / "trace.json", tmp_path / "step.png", 3)


def test_the_command_draws_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `examples`")
    chrome.write(tmp_path / "trace.json", TRACE)
    main([str(tmp_path / "trace.json"), str(tmp_path / "new" / "step.png"), "--step", "3"])
    assert (tmp_path / "new" / "step.png").read_bytes().startswith(b"\x89PNG")
