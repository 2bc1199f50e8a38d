"""Turns measured records into tables. Pure functions."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.benchmarks.peers import PEERS


@dataclass(frozen=True)
class Row:
    """One peer on one setting.

    Attributes:
        peer: The adapter's name.
        model: The model's name.
        ranks: N.
        optimizer: The optimizer's name.
        seconds: Quartiles of a step's wall time on rank 0, over all repetitions.
        sent: Bytes per step that leave the busiest rank's link, median over steps; 0 where not measured.
        cpu: CPU seconds per step, all ranks together, median.
        memory: Peak resident bytes of the largest rank.
        losses: Mean over ranks, by step.
        counted: Payload bytes sent per step by kind, mean over ranks, where the peer counts them.
        error: Why it did not run, "" where it did.
    """

    peer: str
    model: str
    ranks: int
    optimizer: str
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    sent: float = 0.0
    cpu: float = 0.0
    memory: int = 0
    losses: tuple[float, ...] = ()
    counted: dict[str, float] = field(default_factory=dict)
    error: str = ""


def summarise(records: Iterable[dict[str, Any]]) -> list[Row]:
    """One row per (model, ranks, optimizer, peer), in the order of first appearance.

    Args:
        records: As ``run.py`` writes them: a job, and by rank what was measured or an error.

    Returns:
        The rows.
    """
    groups: dict[tuple[str, int, str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        job = record["job"]
        groups[job["model"], job["ranks"], job["optimizer"], job["peer"]].append(record)
    return [_row(key, group) for key, group in groups.items()]


def _row(key: tuple[str, int, str, str], group: list[dict[str, Any]]) -> Row:
    model, ranks, optimizer, peer = key
    errors = [r["error"] for record in group for r in record["results"] if "error" in r]
    if errors:
        # the first rank's complaint is often "a peer closed the connection": the longest says most
        return Row(peer, model, ranks, optimizer, error=max(errors, key=len))
    seconds = [s["seconds"] for record in group for s in record["results"][0]["steps"]]
    per_rank_sent = [
        statistics.median(s["sent"] for record in group for s in record["results"][r]["steps"]) for r in range(ranks)
    ]
    cpu = [
        sum(result["steps"][k]["cpu"] for result in record["results"])
        for record in group
        for k in range(len(record["results"][0]["steps"]))
    ]
    losses = tuple(statistics.fmean(values) for values in zip(*(r["losses"] for r in group[0]["results"])))
    return Row(
        peer,
        model,
        ranks,
        optimizer,
        quartiles(seconds),
        max(per_rank_sent),
        statistics.median(cpu),
        max(result["peak_rss"] for record in group for result in record["results"]),
        losses,
        _counted([r["counted"] for r in group[0]["results"] if "counted" in r]),
    )


def _counted(counts: Sequence[dict[str, Any]]) -> dict[str, float]:
    kinds = {kind for count in counts for kind in count["sent"]}
    return {k: statistics.fmean(c["sent"].get(k, 0) / c["steps"] for c in counts) for k in sorted(kinds)}


def level(row: Row) -> float:
    """Row and gradient bytes per rank and step × N/(N−1): what must not grow with N."""
    return (row.counted.get("rows", 0.0) + row.counted.get("grads", 0.0)) * row.ranks / (row.ranks - 1)


def volumes(rows: Sequence[Row]) -> str:
    """What ``embrace`` counted, by kind: its row bytes stay level, its id bytes grow with N. Markdown."""
    lines = [
        "| model | ranks | peer | rows and gradients × N/(N−1), MB | ids, MB | headers, MB | dense, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted((r for r in rows if r.counted and r.ranks > 1), key=lambda r: (r.model, r.peer, r.ranks)):
        kinds = (level(row), *(row.counted.get(kind, 0.0) for kind in ("ids", "header", "dense")))
        cells = (row.model, str(row.ranks), PEERS[row.peer].label, *(f"{value / 1e6:.4f}" for value in kinds))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, middle, third


def losses_agree(row: Row, ours: Row, tolerance: float) -> bool:
    """Whether two peers did the same work: equal loss curves to a relative tolerance."""
    pairs = list(zip(row.losses, ours.losses))
    return bool(pairs) and all(abs(a - b) <= tolerance * max(1.0, abs(b)) for a, b in pairs)


def bound(compute: float, sent: float, bytes_per_second: float) -> float:
    """No step can be faster than its compute, nor than its bytes on the link: max of both, in seconds."""
    return max(compute, sent / bytes_per_second if bytes_per_second else 0.0)


def markdown(rows: Sequence[Row], bytes_per_second: float, tolerance: float = 1e-4) -> str:
    """Tables with ratios to ``embrace``, one per model, number of ranks and optimizer.

    Args:
        rows: From :func:`summarise`.
        bytes_per_second: The links' rate, 0: not shaped.
        tolerance: For :func:`losses_agree`.

    Returns:
        Markdown.
    """
    parts = []
    settings = dict.fromkeys((row.model, row.ranks, row.optimizer) for row in rows)
    for model, ranks, optimizer in settings:
        group = [r for r in rows if (r.model, r.ranks, r.optimizer) == (model, ranks, optimizer)]
        parts.append(f"#### {model}, {ranks} ranks, {optimizer}\n\n{_table(group, bytes_per_second, tolerance)}\n")
    return "\n".join(parts)


_HEAD = (
    "peer",
    "step, s (quartiles)",
    "ratio to embrace",
    "sent a step, MB",
    "ratio of bytes",
    "bound, s",
    "step ÷ bound",
    "CPU s a step",
    "peak memory, MB",
    "same losses",
)


def _table(group: Sequence[Row], bytes_per_second: float, tolerance: float) -> str:
    ours = next((r for r in group if r.peer == "embrace" and not r.error), None)
    alone = next((r for r in group if r.peer == "none" and not r.error), None)
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    for row in group:
        label = PEERS[row.peer].label
        if row.error:
            lines.append(f"| {label} | did not run: {_one_line(row.error)} |" + " |" * (len(_HEAD) - 2))
            continue
        low, middle, high = row.seconds
        limit = bound(alone.seconds[1] if alone else 0.0, row.sent, bytes_per_second)
        same = "–" if ours is None or row.peer == "none" else "yes" if losses_agree(row, ours, tolerance) else "**no**"
        cells = (
            label,
            f"{middle:.3f} ({low:.3f}–{high:.3f})",
            f"{middle / ours.seconds[1]:.2f}×" if ours else "–",
            f"{row.sent / 1e6:.3f}",
            f"{row.sent / ours.sent:.2f}×" if ours and ours.sent else "–",
            f"{limit:.3f}" if limit else "–",
            f"{middle / limit:.2f}" if limit else "–",
            f"{row.cpu:.3f}",
            f"{row.memory / 1e6:.0f}",
            same,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _one_line(text: str, limit: int = 160) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= limit else line[: limit - 1] + "…"
