"""What a row's step is held against: the larger of compute and bytes, and the critical path. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from examples.benchmarks.critical import StepWork, critical_path
from examples.benchmarks.rows import Row

#: kinds of payload in a step that neither prior gradients nor rest rows nor dense gradients are
_FREE = ("ids", "header", "buffers")


def bound(compute: float, sent: float, bytes_per_second: float) -> float:
    """No step can be faster than its compute, nor than its bytes on the link: max of both, in seconds."""
    return max(compute, sent / bytes_per_second if bytes_per_second else 0.0)


def compute_of(row: Row, alone: Row | None) -> float:
    """Seconds that a step computes.

    Args:
        row: Of any peer.
        alone: The run without communication.

    Returns:
        Seconds of a whole step of the run without communication, emulated blocks or not: loss, optimizer and batches
        are real in any case. Without such a run, what emulated blocks were told to take.
    """
    if alone is not None:
        return alone.seconds[1]
    return row.job.compute_ms / 1e3 if row.job.compute == "emulated" else 0.0


def step_work(row: Row, compute: float) -> StepWork | None:
    """What one step of ``embrace`` asks of the busiest rank; None for peers that do not count.

    Payload is counted by kind; what TCP and Ethernet put around it is laid on all kinds alike. Compute and dense bytes
    are divided among the blocks by their parameters, a third of the compute to forward, as emulated blocks have it.
    """
    if not row.steps or not row.blocks:
        return None

    def payload(kind: str) -> float:
        return max(row.steps.get(f"sent {kind}", 0.0), row.steps.get(f"received {kind}", 0.0))

    prior = row.share("prior", "delayed")
    rest = row.share("rest", "early")
    # without look-ahead nothing is known to be free: all of it is asked for and answered between two steps
    prior, rest = (1.0 if share is None else share for share in (prior, rest))
    sizes = [size / sum(row.blocks) for size in row.blocks]
    grads, rows, dense = payload("grads"), payload("rows"), payload("dense")
    free = sum(map(payload, _FREE)) + grads * (1 - prior) + rows * (1 - rest)
    urgent = payload("replicated") + grads * prior
    counted = free + urgent + rows * rest + dense
    overhead = max(1.0, row.wire / counted) if counted else 1.0
    return StepWork(
        [compute * size / 3 for size in sizes],
        [compute * size * 2 / 3 for size in sizes],
        [dense * size * overhead for size in sizes],
        urgent * overhead,
        rows * rest * overhead,
        free * overhead,
    )


def critical(row: Row, alone: Row | None) -> float | None:
    """The critical path of a row in seconds; None for peers that do not count.

    ``embrace`` under other schedules is held against what its own counts allow: with whole gradients all are prior.
    """
    work = step_work(row, compute_of(row, alone))
    return None if work is None else critical_path(work, row.setting.bytes_per_second)


def alone_of(rows: Sequence[Row]) -> Row | None:
    """The run without communication."""
    return next((row for row in rows if row.peer == "none" and not row.error), None)
