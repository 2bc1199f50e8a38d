"""What scripts share that measure one large table: each rank is the script itself, in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: of a Trainer in one of the processes, beside ``num_nodes``: somebody else has started them, and nothing is logged
TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


def results_of(script: str, arguments: Sequence[object], ranks: int, timeout: float, folder: Path) -> list[Any]:
    """Runs a script once for each rank, on the loopback interface.

    Args:
        script: Its path. It writes what it has found, as JSON, to the file after ``--result``.
        arguments: Of its command line.
        ranks: N.
        timeout: Seconds.
        folder: For the files.

    Returns:
        The results by rank.
    """
    from examples.benchmarks.cluster import Cluster, check, run_ranks

    files = [folder / f"{rank}.json" for rank in range(ranks)]
    own = [sys.executable, script, *map(str, arguments)]
    with Cluster(ranks, kind="loopback") as cluster:
        commands = [[*own, "--result", str(file)] for file in files]
        check(run_ranks(cluster, commands, [{"OMP_NUM_THREADS": "1"}] * ranks, timeout))
    return [json.loads(file.read_text()) for file in files]


def status(name: str) -> int:
    """Bytes that ``/proc/self/status`` says, of what is resident now (VmRSS) or was at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def heading(rows: int, columns: int, how: str) -> str:
    """Says what was measured, and where.

    Args:
        rows: V.
        columns: D.
        how: The optimizer, and what else is to be said.
    """
    import torch

    return (
        f"V = {rows:,}, D = {columns} ({rows * columns * 4 / 1e6:,.0f} MB), {how}; torch {torch.__version__}, Python"
        f" {platform.python_version()}, {os.uname().sysname}\n"
    )
