"""What has come of a fleet, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from lightning_embrace.fleet.task import TaskResult


def render_results(results: Sequence[TaskResult]) -> Table:
    """Draws them; ``rich.print`` shows the table.

    Args:
        results: Of a fleet.
    """
    table = Table()
    for name in ("task", "", "logged last"):
        table.add_column(name, overflow="fold")
    for result in results:
        table.add_row(result.name, _outcome(result), ", ".join(logged(result.metrics)))
    return table


def logged(metrics: Mapping[str, float]) -> list[str]:
    """Metrics as people are shown them, wherever that is.

    Args:
        metrics: By name.
    """
    return [f"{name} {value:.4g}" for name, value in metrics.items()]


def _outcome(result: TaskResult) -> str:
    if result.error is not None:
        return "failed"
    return "finished" if result.dropped is None else "dropped"
