"""Draws one step of a trace file: ``python -m lightning_embrace.monitor.picture trace.json step.png --step 3``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_embrace.monitor.chrome import Trace, read
from lightning_embrace.monitor.intervals import pack
from lightning_embrace.monitor.span import LANES

_COLOURS = {"compute": "#8fb3a5", "sparse group": "#e08a3c", "dense group": "#5b84b1", "waiting": "#c0504d"}
_LETTER_SHARE = 0.0065  # of the picture's width, per letter of a label


@dataclass(frozen=True)
class Bar:
    """One span in the picture. Times are milliseconds since the step began.

    Attributes:
        rank: Its rank.
        lane: Its lane.
        row: Its row within the lane, from the top.
        begin: When it starts, in the picture.
        end: When it ends, in the picture.
        name: What it is called.
        own: It belongs to the step itself, not to a neighbour.
    """

    rank: int
    lane: str
    row: int
    begin: float
    end: float
    name: str
    own: bool


def bars(trace: Trace, step: int, ranks: int) -> list[Bar]:
    """What is to be drawn: all that runs while any of these ranks computes the step.

    Args:
        trace: A trace of some ranks.
        step: The step.
        ranks: How many ranks, from the first.

    Returns:
        The bars, by rank and lane.

    Raises:
        ValueError: The trace has no compute of this step.
    """
    shown = sorted({event["pid"] for event in trace["traceEvents"]})[:ranks]
    events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] in shown]
    computed = [event for event in events if event["cat"] == "compute"]
    of_step = [event for event in computed if event["args"].get("step") == step]
    if not of_step:
        steps = sorted({event["args"]["step"] for event in computed if "step" in event["args"]})
        there = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
        raise ValueError(f"step={step}: the trace has {there}. Ask for one of these.")
    left, right = min(e["ts"] for e in of_step), max(e["ts"] + e["dur"] for e in of_step)
    seen = [e for e in events if e["ts"] < right and e["ts"] + e["dur"] > left]
    found: list[Bar] = []
    for rank in shown:
        for lane in LANES:
            here = [e for e in seen if e["pid"] == rank and e["cat"] == lane]
            rows = pack([(round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in here])
            found += [_bar(event, row, left, right, step) for event, row in zip(here, rows)]
    return found


def draw(path: str | os.PathLike[str], picture: str | os.PathLike[str], step: int, ranks: int = 2) -> None:
    """Draws one step of a trace file.

    Args:
        path: The trace, as written with :func:`~lightning_embrace.monitor.chrome.write`.
        picture: Where to; the suffix says the format.
        step: The step.
        ranks: How many ranks are shown, from the first.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: The trace has no such step.
    """
    shown = bars(read(path), step, ranks)
    by_rank = [[bar for bar in shown if bar.rank == rank] for rank in sorted({bar.rank for bar in shown})]
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Pictures are drawn with matplotlib, which is not installed: pip install 'lightning-embrace[examples]'.",
            name=error.name,
        ) from error
    heights = [sum(_depth(group, lane) for lane in LANES) for group in by_rank]
    figure = Figure(figsize=(12, 0.8 + 0.34 * sum(heights) + 0.4 * len(heights)), layout="constrained")
    axes = figure.subplots(len(by_rank), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, group in zip(axes, by_rank):
        _draw_rank(axis, group, max(bar.end for bar in shown))
    axes[-1].set_xlabel(f"milliseconds of step {step}; pale: other steps")
    path = Path(picture)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _bar(event: dict[str, Any], row: int, left: float, right: float, step: int) -> Bar:
    begin, end = max(event["ts"], left), min(event["ts"] + event["dur"], right)
    own = event["args"].get("step") == step
    return Bar(event["pid"], event["cat"], row, (begin - left) / 1e3, (end - left) / 1e3, event["name"], own)


def _depth(group: list[Bar], lane: str) -> int:
    return max((bar.row + 1 for bar in group if bar.lane == lane), default=1)


def _draw_rank(axis: Any, group: list[Bar], width: float) -> None:
    top, middles = 0, []
    for lane in LANES:
        depth = _depth(group, lane)
        middles.append(top + depth / 2)
        for bar in (b for b in group if b.lane == lane):
            middle, long = top + bar.row + 0.5, bar.end - bar.begin
            style = {
                "facecolor": _COLOURS[lane],
                "alpha": 1.0 if bar.own else 0.4,
                "edgecolor": "white",
                "linewidth": 0.8,
            }
            axis.barh(middle, long, left=bar.begin, height=0.8, **style)
            letters = int(long / width / _LETTER_SHARE)
            if letters >= 5:
                name = bar.name if len(bar.name) <= letters else f"{bar.name[: letters - 1]}…"
                axis.text(bar.begin + 0.003 * width, middle, name, va="center", fontsize=7, clip_on=True)
        top += depth
        axis.axhline(top, color="#dddddd", linewidth=0.6)
    axis.set_ylim(top, 0)
    axis.set_xlim(0, width)
    axis.set_yticks(middles, LANES, fontsize=8)
    axis.set_title(f"rank {group[0].rank}", loc="left", fontsize=9)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m lightning_embrace.monitor.picture", description=__doc__)
    parser.add_argument("trace", help="the trace file")
    parser.add_argument("picture", help="where to draw, such as step.png")
    parser.add_argument("--step", type=int, required=True, help="which step")
    parser.add_argument("--ranks", type=int, default=2, help="how many ranks are shown")
    given = parser.parse_args(arguments)
    draw(given.trace, given.picture, given.step, given.ranks)


if __name__ == "__main__":
    main()
