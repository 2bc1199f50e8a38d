"""Steps of ``hydra`` beside plain training and DeepSpeed ZeRO-3: same model, batch and precision, in fresh processes.

    python examples/benchmarks/spilled_throughput.py --disk /scratch

prints a Markdown table. The peers take turns, and every one is started again each time, so that what else runs on the
machine meets all alike. DeepSpeed needs ``examples/benchmarks/environment.sh deepspeed``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.benchmarks.spilled_gpt import parameters_of  # noqa: E402
from examples.benchmarks.spilled_job import Job, JobError, result_of  # noqa: E402

PLAIN, DEEPSPEED = "plain", "DeepSpeed ZeRO-3, offload to host"
#: steps before those that count: one is measured, one begins with a new plan
WARMUP = 2


def jobs_of(shape: Job, disk: str) -> dict[str, Job]:
    """What is compared: budgets follow from the model's size.

    Args:
        shape: The model and its batch.
        disk: A folder.
    """
    block, tables = (4 * parameters_of(shape.dim, *sizes, shape.length) for sizes in ((1, 0), (0, shape.vocabulary)))
    # a block saves some 16 numbers for each that it is given
    activations = shape.layers * 18 * 4 * shape.sequences * shape.length * shape.dim
    # both tables stay with their gradients, in a quarter of it; beside them two slots, gradients and all activations
    spilled = replace(shape, strategy="hydra", device=max(8 * tables, 2 * tables + 6 * block + activations))
    on_disk = replace(spilled, host=1 << 20, disk=disk)
    peers = {
        PLAIN: replace(shape, strategy="auto"),
        "hydra, everything fits": replace(shape, strategy="hydra"),
        "hydra, parameters on the host": spilled,
        "hydra, parameters on the host, prefetch off": replace(spilled, prefetch=False),
        "hydra, parameters on the disk": on_disk,
        "hydra, parameters on the disk, prefetch off": replace(on_disk, prefetch=False),
        DEEPSPEED: replace(shape, strategy="deepspeed"),
    }
    if shape.accelerator != "cpu":  # its environment is made for the CPU
        del peers[DEEPSPEED]
    return peers


def hidden(results: Sequence[Mapping[str, Any]]) -> float | None:
    """Of the seconds in which shards were moved, the share in which nobody waited for them; None: nothing was moved."""
    moving, waiting = (sum(r.get("transfers", {}).get(kind, 0.0) for r in results) for kind in ("moving", "waiting"))
    return max(0.0, 1 - waiting / moving) if moving else None


_HEAD = (
    "peer",
    "step, s (lowest–highest run)",
    "throughput ÷ plain",
    "÷ DeepSpeed",
    "transfers, s a step",
    "hidden",
    "same losses",
)


def markdown(results: Mapping[str, Sequence[Mapping[str, Any]]], errors: Mapping[str, str]) -> str:
    """The results as a table; ratios are medians of those between runs of one turn.

    Args:
        results: By peer, one for each turn.
        errors: By peer that could not run, why.
    """
    medians = {peer: [statistics.median(r["seconds"][WARMUP:]) for r in runs] for peer, runs in results.items()}
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|" + "---:|" * (len(_HEAD) - 1)]
    for peer, runs in results.items():
        mine = medians[peer]
        share = hidden(runs)
        steps = sum(len(r["seconds"]) - WARMUP for r in runs)
        moving = sum(r.get("transfers", {}).get("moving", 0.0) for r in runs)
        cells = (
            peer,
            f"{statistics.median(mine):.3f} ({min(mine):.3f}–{max(mine):.3f})",
            _ratio(medians.get(PLAIN), mine),
            _ratio(medians.get(DEEPSPEED), mine),
            f"{moving / steps:.3f}" if moving else "–",
            "–" if share is None else f"{share:.0%}",
            _same(results.get(PLAIN), runs, exact=peer != DEEPSPEED),
        )
        lines.append("| " + " | ".join(cells) + " |")
    for peer, error in errors.items():
        lines.append(f"| {peer} | did not run: {error} |" + " |" * (len(_HEAD) - 2))
    return "\n".join(lines)


def _ratio(others: Sequence[float] | None, mine: Sequence[float]) -> str:
    return "–" if not others else f"{statistics.median(other / my for other, my in zip(others, mine)):.2f}×"


def _same(plain: Sequence[Mapping[str, Any]] | None, runs: Sequence[Mapping[str, Any]], exact: bool) -> str:
    if not plain:
        return "–"
    if all(run["losses"] == plain[0]["losses"] for run in runs):
        return "yes, bit by bit"
    near = all(abs(a - b) <= 1e-4 * abs(b) for run in runs for a, b in zip(run["losses"], plain[0]["losses"]))
    return "yes" if near and not exact else "**no**"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("dim", 1024), ("layers", 12), ("vocabulary", 2000), ("length", 128), ("sequences", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--accelerator", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peers", nargs="*", type=int, help="by number, from 0 (default: all)")
    parser.add_argument("--disk", default="/tmp", help="a folder with room for the model")
    chosen = parser.parse_args(arguments)
    sizes = {name: getattr(chosen, name) for name in ("dim", "layers", "vocabulary", "length", "sequences")}
    shape = Job(**sizes, optimizer=chosen.optimizer, steps=chosen.steps, accelerator=chosen.accelerator)
    jobs = jobs_of(shape, chosen.disk)
    if chosen.peers is not None:
        jobs = {peer: job for number, (peer, job) in enumerate(jobs.items()) if number in chosen.peers}
    results: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    errors: dict[str, str] = {}
    for repetition in range(chosen.repetitions):
        for peer, job in jobs.items():
            if peer in errors:
                continue
            try:
                results[peer].append(result_of(job))
            except (JobError, OSError) as error:
                errors[peer] = " ".join(str(error).split())[-300:].replace("|", "\\|")
                continue
            print(f"{repetition}: {peer} {results[peer][-1]['seconds']}", file=sys.stderr, flush=True)
    some = next(iter(results.values()))[0]
    batch = f"{chosen.sequences} × {chosen.length} tokens"
    size = f"{some['parameters'] / 1e6:,.0f} million parameters"
    print(f"{size}, {chosen.optimizer}, {batch}, {some['threads']} threads\n")
    print(markdown(results, errors))


if __name__ == "__main__":
    main()
