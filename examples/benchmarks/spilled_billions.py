"""Billions of parameters under ``hydra`` on a machine whose memory does not hold them: three steps on one batch.

    python examples/benchmarks/spilled_billions.py --disk /scratch --runs 6B-4096 3B-adamw

prints a Markdown table. Each run is a process that may have no more data than its budgets and 0.5 GiB (RLIMIT_DATA),
takes about ten minutes, and twice the parameters on the disk. ``--billions 0.3`` tries it with a smaller model.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.benchmarks.spilled_gpt import layers_for, parameters_of  # noqa: E402
from examples.benchmarks.spilled_job import Job, JobError, result_of  # noqa: E402
from examples.benchmarks.spilled_memory import NUMBERS, faults  # noqa: E402

_GIB = 1 << 30
_SHAPE = Job(vocabulary=50_000, length=128, sequences=1, steps=3, host=12 * _GIB, limited=True)
#: by name: how many billions of parameters, and how they are trained
RUNS: dict[str, tuple[float, Job]] = {
    "6B-4096": (6.0, replace(_SHAPE, dim=4096, device=4 * _GIB)),
    "3B-adamw": (3.0, replace(_SHAPE, dim=2048, device=4 * _GIB, optimizer="adamw")),
    "6B-2048": (6.0, replace(_SHAPE, dim=2048, device=2 * _GIB)),
}


def job_of(name: str, disk: str, billions: float | None = None) -> Job:
    """A run by its name.

    Args:
        name: Of :data:`RUNS`.
        disk: A folder.
        billions: Of parameters, other than the run's; budgets are in proportion.
    """
    usual, job = RUNS[name]
    count = (usual if billions is None else billions) * 1e9
    layers = layers_for(count, job.dim, job.vocabulary, job.length)
    share = count / 1e9 / usual
    return replace(job, layers=layers, disk=disk, host=int(job.host * share))


def plain_bytes(job: Job) -> int:
    """What plain training takes at least: parameters, gradients and optimizer states."""
    return 4 * (NUMBERS[job.optimizer] + 1) * parameters_of(job.dim, job.layers, job.vocabulary, job.length)


def memory_of_machine() -> int:
    """Bytes of this machine's memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:"))


def check_disk(job: Job) -> None:
    """Refuses what the disk has no room for.

    Raises:
        ValueError: It has none.
    """
    numbers = parameters_of(job.dim, job.layers, job.vocabulary, job.length)
    # while it is built, parameters are in files of their own; afterwards states are as well, while the store shrinks
    need = 4 * numbers * max(2, NUMBERS[job.optimizer]) + _GIB
    free = shutil.disk_usage(job.disk).free
    if need > free:
        raise ValueError(f"{job.disk} has {free / 1e9:.1f} GB free, and this run takes up to {need / 1e9:.1f} GB.")


_HEAD = (
    "run",
    "parameters, billions",
    "plain training takes, GB (machine has)",
    "budgets: device, host, GiB",
    "resident at most, GB",
    "steps, s",
    "built, whole run, s",
    "host read, written a step, GB",
    "disk read, written a step, GB: kernel (plan)",
    "transfers hidden",
    "losses",
    "faults",
)


def markdown(rows: Sequence[tuple[str, Job, Mapping[str, Any]]], machine: int) -> str:
    """The results as a table.

    Args:
        rows: Name, job and result.
        machine: Bytes of its memory.
    """
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|" + "---:|" * (len(_HEAD) - 2) + "---|"]
    for name, job, result in rows:
        moved, plan = result["moved"], result["plan"]
        moving, waiting = (result["transfers"][kind] for kind in ("moving", "waiting"))
        cells = (
            name,
            f"{result['parameters'] / 1e9:.2f}",
            f"{plain_bytes(job) / 1e9:.1f} ({machine / 1e9:.1f})",
            f"{job.device / _GIB:.3g}, {job.host / _GIB:.3g}",
            f"{max(result['peak'].values()) / 1e9:.2f}",
            ", ".join(f"{s:.1f}" for s in result["seconds"]),
            f"{result['built']:.0f}, {result['whole']:.0f}",
            ", ".join(f"{moved.get(f'host {kind}', 0) / 1e9:.2f}" for kind in ("read", "written")),
            ", ".join(
                f"{moved[f'blocks {kind}'] / 1e9:.2f} ({plan.get(f'disk {kind}', 0) / 1e9:.2f})"
                for kind in ("read", "written")
            ),
            f"{max(0.0, 1 - waiting / moving):.0%}",
            ", ".join(f"{loss:.3f}" for loss in result["losses"]),
            "; ".join([*faults(job, result), *_startable(job, machine)]) or "none",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _startable(job: Job, machine: int) -> list[str]:
    return ["plain training would fit this machine"] if plain_bytes(job) <= machine else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--billions", type=float, help="of parameters, instead of the run's own")
    parser.add_argument("--brief", action="store_true", help="end when the last step has, without an ordinary model")
    parser.add_argument("--disk", default="/tmp", help="a folder with room for the parameters, twice")
    chosen = parser.parse_args(arguments)
    machine, rows = memory_of_machine(), []
    for name in chosen.runs:
        job = replace(job_of(name, chosen.disk, chosen.billions), brief=chosen.brief)
        try:
            check_disk(job)
            rows.append((name, job, result_of(job)))
        except (JobError, ValueError) as error:
            print(f"{name} did not run: {error}", file=sys.stderr, flush=True)
            continue
        print(rows[-1], file=sys.stderr, flush=True)
        print(markdown(rows, machine), flush=True)


if __name__ == "__main__":
    main()
