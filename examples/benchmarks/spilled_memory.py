"""Memory and disk traffic of ``hydra`` for models of 2, 4 and 10 times the device's budget, each in a fresh process.

    python examples/benchmarks/spilled_memory.py --device 512MiB --disk /scratch

prints a Markdown table. A process may have no more data than both budgets and 0.5 GiB (RLIMIT_DATA); its largest
resident size (VmHWM) is compared with the same, and what the kernel has read from and written to the disk for it with
what the plan foretells. The host's budget is as large as the device's: of the larger models most is on the disk.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.benchmarks.spilled_gpt import layers_for, parameters_of  # noqa: E402
from examples.benchmarks.spilled_job import Job, JobError, result_of  # noqa: E402

#: how far measured traffic may be from the plan's
TOLERANCE = 0.05
#: numbers that each optimizer keeps for a parameter, the parameter itself among them
NUMBERS = {"sgd": 1, "adamw": 3}


def job_of(times: float, device: int, dim: int, optimizer: str, disk: str) -> Job:
    """A model whose parameters and optimizer states take so many times the device's budget."""
    shape = Job(dim=dim, vocabulary=2000, length=64)
    layers = layers_for(times * device / 4 / NUMBERS[optimizer], dim, shape.vocabulary, shape.length)
    return replace(
        shape, layers=layers, optimizer=optimizer, device=device, host=device, disk=disk, steps=5, limited=True
    )


def faults(job: Job, result: Mapping[str, Any], tolerance: float = TOLERANCE) -> list[str]:
    """What a result shows that must not be; empty: nothing.

    Args:
        job: What was run.
        result: Of it.
        tolerance: How far measured traffic may be from the plan's.
    """
    found = []
    peak = max(result["peak"].values())
    if peak > job.allowed:
        found.append(f"{peak:,} bytes were resident, and {job.allowed:,} are allowed")
    for kind in ("read", "written"):
        planned = result["plan"].get(f"disk {kind}", 0)
        counted = result["moved"].get(f"blocks {kind}", 0)
        if abs(counted - planned) > tolerance * planned:
            found.append(f"{counted:,.0f} bytes a step were {kind} and {planned:,} were planned")
    if not result["plan"].get("disk read"):
        found.append("nothing was read from the disk: nothing was shown")
    if not result["losses"][-1] < result["losses"][0]:
        found.append("the loss has not fallen")
    return found


_HEAD = (
    "optimizer",
    "parameters and states ÷ device budget",
    "budgets: device, host, MB",
    "resident at most, MB",
    "beyond the budgets, MB",
    "read a step, MB: kernel (plan)",
    "written a step, MB: kernel (plan)",
    "step, s",
    "faults",
)


def markdown(rows: Sequence[tuple[Job, Mapping[str, Any]]]) -> str:
    """The results as a table."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|" + "---:|" * (len(_HEAD) - 2) + "---|"]
    for job, result in rows:
        size = 4 * NUMBERS[job.optimizer] * parameters_of(job.dim, job.layers, job.vocabulary, job.length)
        peak = max(result["peak"].values())
        traffic = [
            f"{result['moved'][f'blocks {kind}'] / 1e6:,.1f} ({result['plan'][f'disk {kind}'] / 1e6:,.1f})"
            for kind in ("read", "written")
        ]
        cells = (
            job.optimizer,
            f"{size / job.device:.1f}",
            f"{job.device / 1e6:,.0f}, {job.host / 1e6:,.0f}",
            f"{peak / 1e6:,.0f}",
            f"{(peak - job.device - job.host) / 1e6:,.0f}",
            *traffic,
            f"{min(result['seconds'][2:]):.2f}",
            "; ".join(faults(job, result)) or "none",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints."""
    from lightning_embrace.hydra.sizes import parse_bytes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="512MiB")
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--times", type=float, nargs="*", default=[2, 4, 10])
    parser.add_argument("--optimizers", nargs="*", default=list(NUMBERS), choices=list(NUMBERS))
    parser.add_argument("--disk", default="/tmp", help="a folder with room for the largest model, twice")
    chosen = parser.parse_args(arguments)
    rows = []
    for optimizer in chosen.optimizers:
        for times in chosen.times:
            job = job_of(times, parse_bytes("device_memory", chosen.device), chosen.dim, optimizer, chosen.disk)
            try:
                rows.append((job, result_of(job)))
            except JobError as error:
                print(f"{optimizer}, {times:g} times the device, did not run: {error}", file=sys.stderr, flush=True)
                continue
            print(markdown(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(markdown(rows))


if __name__ == "__main__":
    main()
