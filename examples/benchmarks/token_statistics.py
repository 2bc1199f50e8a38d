"""What the batches look up, counted: the benchmark's result depends on it.

Pure functions on ids. (Not called `statistics`: a script in this folder would hide Python's own module of that name.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.benchmarks.data import Source, looked_up, make_batch
from examples.models.registry import BatchSpec

#: by step, by rank, the ids that are looked up in one table
Ids = Sequence[Sequence[Tensor]]


@dataclass(frozen=True)
class TableStatistics:
    """Look-ups of one table, means over steps (and ranks).

    Attributes:
        tokens: Look-ups of a rank in a step.
        unique: Rows that a rank looks up in a step: what travels under ``embrace``.
        union: Rows that all ranks together look up in a step.
        prior: Share of a rank's rows that some rank looks up in the next step: their gradients are urgent.
        early: Share of the next step's rows that the last step touched, and this one does not. They look untouched by
            the step that is running, but their delayed gradients may still be on the way.
    """

    tokens: float
    unique: float
    union: float
    prior: float
    early: float


def table_statistics(ids: Ids) -> TableStatistics:
    """Counts the look-ups of one table.

    Args:
        ids: By step and rank; at least one step.

    Returns:
        The means. Shares are of all rows of the steps that have what to compare with, and ``nan`` without any.
    """
    unique = [[torch.unique(rank) for rank in step] for step in ids]
    union = [torch.unique(torch.cat(step)) for step in unique]
    parts = [rank for step in unique for rank in step]
    prior = [(_common(rank, following), rank.numel()) for step, following in zip(unique, union[1:]) for rank in step]
    early = [
        (_common(_without(following, current), last), following.numel())
        for last, current, following in zip(union, union[1:], union[2:])
    ]
    return TableStatistics(
        tokens=_mean([rank.numel() for step in ids for rank in step]),
        unique=_mean([part.numel() for part in parts]),
        union=_mean([rows.numel() for rows in union]),
        prior=_share(prior),
        early=_share(early),
    )


def _common(a: Tensor, b: Tensor) -> int:
    return int(torch.isin(a, b).sum())


def _without(a: Tensor, b: Tensor) -> Tensor:
    return a[~torch.isin(a, b)]


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def _share(parts: Sequence[tuple[int, int]]) -> float:
    whole = sum(total for _, total in parts)
    return sum(part for part, _ in parts) / whole if whole else float("nan")


def statistics(spec: BatchSpec, source: Source, ranks: int, steps: int, seed: int = 0) -> dict[str, TableStatistics]:
    """Counts the look-ups of every table of a model in the batches that the benchmark trains on.

    Args:
        spec: The model's batches.
        source: Of their ids.
        ranks: Number of ranks.
        steps: Number of steps.
        seed: Of the run.

    Returns:
        By table.
    """
    seen = [[looked_up(spec, make_batch(spec, source, seed, r, t)) for r in range(ranks)] for t in range(steps)]
    return {table: table_statistics([[rank[table] for rank in step] for step in seen]) for table in spec.lookups}


def markdown(tables: Mapping[str, TableStatistics]) -> str:
    """The statistics as a small table."""
    head = ("table", "look-ups", "unique rows", "rows, all ranks", "prior", "touched at t−1, not at t")
    lines = [head, ("---",) + ("---:",) * (len(head) - 1)]
    for name, s in tables.items():
        counts = (f"{s.tokens:,.0f}", f"{s.unique:,.0f}", f"{s.union:,.0f}")
        lines.append((name, *counts, f"{s.prior:.0%}", f"{s.early:.1%}"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
