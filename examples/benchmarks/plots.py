"""Draws the measured rows: step time by peer, bytes per step by number of ranks, scaling."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from examples.benchmarks.peers import PEERS
from examples.benchmarks.rows import Row, Setting


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes the plots that the rows allow.

    Args:
        rows: From :func:`~examples.benchmarks.rows.summarise`.
        folder: Where the PNG files go.

    Returns:
        The files.
    """
    good = [row for row in rows if not row.error]
    files = []
    groups: dict[Setting, list[Row]] = defaultdict(list)
    for row in good:
        groups[replace(row.setting, work=replace(row.setting.work, ranks=0))].append(row)
    names: Counter[str] = Counter()
    for setting, group in groups.items():
        name = "-".join([setting.work.model, setting.work.optimizer, *setting.work.compute.split("real")]).strip("-")
        names[name] += 1
        name += f"-{names[name]}" if names[name] > 1 else ""
        largest = max(r.ranks for r in group)
        files.append(_bars([r for r in group if r.ranks == largest], folder / f"steps-{name}.png"))
        if len({r.ranks for r in group}) > 1:
            bytes_file, scaling_file = folder / f"bytes-{name}.png", folder / f"scaling-{name}.png"
            files.append(_lines(group, bytes_file, "MB sent per step by the busiest rank", lambda r: r.sent / 1e6))
            files.append(_lines(group, scaling_file, "seconds per step", lambda r: r.seconds[1]))
            files.append(_levels(group, folder / f"rows-{name}.png"))
    return files


def _figure(title: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.set_title(title)
    return figure, axes


def _save(figure: Any, file: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return file


def _bars(rows: Sequence[Row], file: Path) -> Path:
    """Step time by peer, with quartiles."""
    figure, axes = _figure(f"{rows[0].model}, {rows[0].ranks} ranks, {rows[0].optimizer}: seconds per step")
    ordered = sorted(rows, key=lambda r: r.seconds[1], reverse=True)
    middles = [r.seconds[1] for r in ordered]
    low = [r.seconds[1] - r.seconds[0] for r in ordered]
    high = [r.seconds[2] - r.seconds[1] for r in ordered]
    colours = ["tab:green" if r.peer.startswith("embrace") else "tab:gray" for r in ordered]
    axes.barh([r.label for r in ordered], middles, xerr=[low, high], color=colours)
    for place, value in enumerate(middles):
        axes.text(value, place, f" {value:.3f}", va="bottom")
    return _save(figure, file)


def _levels(rows: Sequence[Row], file: Path) -> Path:
    """Row bytes of ``embrace`` × N/(N−1) over the number of ranks, beside what AllGather puts on the wire."""
    figure, axes = _figure(f"{rows[0].model}, {rows[0].optimizer}: row bytes per rank and step")
    mine = sorted((r for r in rows if r.peer == "embrace" and r.ranks > 1), key=lambda r: r.ranks)
    ranks = [r.ranks for r in mine]
    axes.plot(ranks, [r.level / 1e6 for r in mine], marker="o", label="embrace, rows × N/(N−1)")
    axes.plot(ranks, [r.counted.get("ids", 0) / 1e6 for r in mine], marker=".", label="embrace, ids")
    for peer in ("ddp-sparse", "horovod-allgather"):
        points = sorted((r.ranks, r.sent / 1e6) for r in rows if r.peer == peer and r.ranks > 1 and r.sent)
        if points:
            axes.plot(*zip(*points), marker="s", label=f"{PEERS[peer].label}, all bytes")
    axes.set_xlabel("ranks")
    axes.set_ylabel("MB")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    return _save(figure, file)


def _lines(rows: Sequence[Row], file: Path, label: str, value: Callable[[Row], float]) -> Path:
    """One line per peer over the number of ranks."""
    figure, axes = _figure(f"{rows[0].model}, {rows[0].optimizer}: {label}")
    for peer in dict.fromkeys(r.peer for r in rows):
        points = sorted((r.ranks, value(r)) for r in rows if r.peer == peer)
        if any(y for _, y in points):
            axes.plot(*zip(*points), marker="o", label=PEERS[peer].label)
    axes.set_xlabel("ranks")
    axes.set_xticks(sorted({r.ranks for r in rows}))
    axes.set_yscale("log")
    axes.set_ylabel(label)
    axes.legend(fontsize="small")
    return _save(figure, file)
