"""Turns measured records into tables.

Several runs' records become one report with plots, where a long benchmark was split::

    python examples/benchmarks/report.py RUN1/records.jsonl RUN2/records.jsonl --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.bounds import alone_of, bound, compute_of, critical
from examples.benchmarks.plots import draw
from examples.benchmarks.rows import Row, Setting, summarise

#: what is said of a run above its tables; runs that differ say so
_ABOUT = ("machine", "cores", "commit", "time", "network", "command")


def volumes(rows: Sequence[Row]) -> str:
    """What ``embrace`` counted, by kind: its row bytes stay level, its id bytes grow with N. Markdown."""
    lines = [
        "| model | ranks | peer | rows and gradients × N/(N−1), MB | ids, MB | headers, MB | dense, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted((r for r in rows if r.counted and r.ranks > 1), key=lambda r: (r.model, r.peer, r.ranks)):
        kinds = (row.level, *(row.counted.get(kind, 0.0) for kind in ("ids", "header", "dense")))
        cells = (row.model, str(row.ranks), row.label, *(f"{value / 1e6:.4f}" for value in kinds))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def losses_agree(row: Row, ours: Row, tolerance: float) -> bool:
    """Whether two peers did the same work: equal jobs, and equal loss curves to a relative tolerance."""
    pairs = list(zip(row.losses, ours.losses))
    alike = row.job.same_work_as(ours.job) and bool(pairs)
    return alike and all(abs(a - b) <= tolerance * max(1.0, abs(b)) for a, b in pairs)


def markdown(rows: Sequence[Row], tolerance: float = 1e-4) -> str:
    """Tables with ratios to ``embrace``, one per setting.

    Args:
        rows: From :func:`~examples.benchmarks.rows.summarise`.
        tolerance: For :func:`losses_agree`.

    Returns:
        Markdown.
    """
    settings = dict.fromkeys(row.setting for row in rows)
    parts = [(setting, [r for r in rows if r.setting == setting]) for setting in settings]
    return "\n".join(f"#### {_title(setting)}\n\n{_table(group, tolerance)}\n" for setting, group in parts)


def _title(setting: Setting) -> str:
    work = setting.work
    sizes = [f"{name} {value:,}" for name in ("vocabulary", "dim", "batch", "length") if (value := getattr(work, name))]
    rate = [f"links of {setting.rate}"] if setting.rate else []
    size = [] if work.size == "small" else [f"size {work.size}"]
    return ", ".join([work.model, f"{work.ranks} ranks", work.optimizer, setting.compute, *rate, *size, *sizes])


_HEAD = (
    "peer",
    "step, s (quartiles)",
    "ratio to embrace",
    "sent a step, MB",
    "ratio of bytes",
    "max(C, T), s",
    "step ÷ max(C, T)",
    "critical path, s",
    "step ÷ critical path",
    "CPU s a step",
    "idle CPU",
    "peak memory, MB",
    "prior",
    "early",
    "exposed waiting, s",
    "same losses",
)


def _table(group: Sequence[Row], tolerance: float) -> str:
    ours = next((r for r in group if r.peer == "embrace" and not r.job.wire_dtype and not r.error), None)
    alone = alone_of(group)
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    for row in group:
        if row.error:
            lines.append(f"| {row.label} | did not run: {_one_line(row.error)} |" + " |" * (len(_HEAD) - 2))
            continue
        lines.append("| " + " | ".join(_cells(row, ours, alone, tolerance)) + " |")
    notes = [f"- {row.label} {note}" for row in group for note in row.notes]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _cells(row: Row, ours: Row | None, alone: Row | None, tolerance: float) -> tuple[str, ...]:
    low, middle, high = row.seconds
    limit = bound(compute_of(row, alone), row.wire, row.setting.bytes_per_second)
    path = critical(row, alone)
    same = "–" if ours is None or row.peer == "none" else "yes" if losses_agree(row, ours, tolerance) else "**no**"
    return (
        row.label,
        f"{middle:.3f} ({low:.3f}–{high:.3f})",
        f"{middle / ours.seconds[1]:.2f}×" if ours else "–",
        f"{row.sent / 1e6:.3f}",
        f"{row.sent / ours.sent:.2f}×" if ours and ours.sent else "–",
        f"{limit:.3f}" if limit else "–",
        f"{middle / limit:.2f}" if limit else "–",
        f"{path:.3f}" if path else "–",
        f"{middle / path:.2f}" if path else "–",
        f"{row.cpu:.3f}",
        _percent(row.idle),
        f"{row.memory / 1e6:.0f}",
        *(_percent(row.share(*kinds)) for kinds in (("prior", "delayed"), ("early", "rest"))),
        "–" if row.exposed is None else f"{row.exposed:.3f}",
        same,
    )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _one_line(text: str, limit: int = 160) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= limit else line[: limit - 1] + "…"


def heading(records: Iterable[dict[str, Any]]) -> str:
    """Where, when and by which command the records were measured; one line for each thing, with all its values."""
    lines = []
    for key in _ABOUT:
        values = dict.fromkeys(str(record[key]) for record in records if key in record)
        lines.append(f"- {key}: {'; '.join(values)}")
    return "\n".join(lines)


def write(records: Sequence[dict[str, Any]], folder: Path, more: str = "") -> str:
    """Writes ``report.md`` and the plots.

    Args:
        records: As ``run.py`` writes them.
        folder: Where to.
        more: Goes before the tables.

    Returns:
        The report without its heading.
    """
    rows = summarise(records)
    parts = [more, markdown(rows), "#### Counted payload", volumes(rows)]
    text = "\n\n".join(part for part in parts if part) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(f"{heading(records)}\n\n{text}")
    draw(rows, folder)
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes one report of several runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="records.jsonl of the runs")
    parser.add_argument("--out", type=Path, required=True, help="folder for report.md and the plots")
    chosen = parser.parse_args(arguments)
    lines = [line for file in chosen.records for line in file.read_text().splitlines() if line]
    print(write([json.loads(line) for line in lines], chosen.out))


if __name__ == "__main__":
    main()
