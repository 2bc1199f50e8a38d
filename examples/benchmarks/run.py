"""Measures ``embrace`` beside what a user would pick instead, on the same model, data, seeds and network, in one run.

``python examples/benchmarks/run.py --models lm,bert --ranks 4,8 --rate 1gbit`` writes JSON lines, a Markdown table and
plots into a folder. ``--quick`` ends in about three minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: what `--quick` leaves out
_LONG = ("embrace-horizontal", "embrace-vertical", "embrace-horovod")
_WORKER = "examples.benchmarks.worker"
#: Lightning would give each rank all cores, and OpenMP threads of several ranks fight over them
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
sys.path.insert(0, str(ROOT))

from examples.benchmarks.cluster import Cluster, run_ranks  # noqa: E402
from examples.benchmarks.data import make_source  # noqa: E402
from examples.benchmarks.forking import Preloaded  # noqa: E402
from examples.benchmarks.job import Job  # noqa: E402
from examples.benchmarks.peers import PEERS  # noqa: E402
from examples.benchmarks.report import write  # noqa: E402
from examples.benchmarks.token_statistics import markdown as tables  # noqa: E402
from examples.benchmarks.token_statistics import statistics  # noqa: E402
from examples.models.registry import batch_spec  # noqa: E402


def python_of(environment: str) -> Path:
    """The interpreter of a peer's virtual environment."""
    return Path(sys.executable) if environment == "main" else ROOT / ".venvs" / environment / "bin" / "python"


def measure(job: Job, cluster: Any, timeout: float, preloaded: Preloaded) -> dict[str, Any]:
    """Runs one job on a cluster.

    Args:
        job: The job.
        cluster: Of as many ranks.
        timeout: Seconds after which the ranks are killed.
        preloaded: Whose forks the ranks are.

    Returns:
        A record: the job, and by rank what was measured or an error.
    """
    peer = PEERS[job.peer]
    python = python_of(peer.environment)
    if job.optimizer not in peer.optimizers:
        return _refused(job, f"runs with {', '.join(peer.optimizers)} only")
    if not python.exists():
        return _refused(job, f"its environment {python.parents[1].relative_to(ROOT)} is missing: run `make peers`")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(job.ranks)]
        commands = [[str(python), "-m", _WORKER, job.to_json(), str(file)] for file in files]
        start = preloaded.starter(python, [_WORKER, peer.adapter], _ENVIRONMENT)
        outcomes = run_ranks(cluster, commands, [_ENVIRONMENT] * job.ranks, timeout, cwd=ROOT, start=start)
        results = [
            json.loads(file.read_text()) if file.exists() else {"error": outcome.describe(lines=5)}
            for file, outcome in zip(files, outcomes)
        ]
    return {"job": json.loads(job.to_json()), "results": results}


def _refused(job: Job, why: str) -> dict[str, Any]:
    return {"job": json.loads(job.to_json()), "results": [{"error": why}] * job.ranks}


def machine() -> dict[str, Any]:
    """Where and when this was measured."""
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "commit": commit.stdout.strip(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    names = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names, default=["lm"], help="of lm, gnmt, transformer, bert")
    parser.add_argument("--ranks", type=lambda t: [int(n) for n in names(t)], default=[2])
    parser.add_argument("--peers", type=names, default=list(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--optimizers", type=names, default=["sgd"], help="of sgd, adam, adagrad")
    parser.add_argument("--rate", default="1gbit", help="of every link, as tc has it; or one per rank, by commas")
    parser.add_argument("--delay", default="", help="of every link, as tc has it")
    parser.add_argument("--compute", choices=("real", "emulated"), default="real")
    parser.add_argument("--compute-ms", type=float, default=0.0, help="emulated time of forward and backward")
    parser.add_argument("--size", choices=("small", "paper"), default="small")
    for name in ("vocabulary", "dim", "batch", "length", "negatives"):
        parser.add_argument(f"--{name}", type=int, default=0, help="0: the size's default")
    parser.add_argument("--exponent", type=float, default=1.1, help="of the ids' Zipf distribution; 0: real text")
    parser.add_argument("--text", default="", help="file for real text")
    parser.add_argument("--wire-dtype", default="", choices=("", "bf16", "fp16"), help="embrace only; changes numbers")
    parser.add_argument("--warmup", type=int, default=4, help="steps; the look-ahead is learned in them")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=3, help="interleaved: every peer once, then again")
    parser.add_argument("--traced-steps", type=int, default=5, help="of one more run of embrace, not timed; 0: none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one job")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark-results" / time.strftime("%Y%m%d-%H%M%S"))
    parser.add_argument("--quick", action="store_true", help="LM at 2 ranks, once: about three minutes")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.models, chosen.ranks, chosen.repetitions, chosen.steps, chosen.rate = ["lm"], [2], 1, 3, "200mbit"
        chosen.peers, chosen.traced_steps = [p for p in chosen.peers if p not in _LONG], 0
    return chosen


def jobs(chosen: argparse.Namespace, model: str, ranks: int, optimizer: str) -> list[Job]:
    """One job per peer, alike but for the peer."""
    return [
        Job(
            peer=peer,
            model=model,
            size=chosen.size,
            ranks=ranks,
            optimizer=optimizer,
            vocabulary=chosen.vocabulary,
            dim=chosen.dim,
            batch=chosen.batch,
            length=chosen.length,
            negatives=chosen.negatives,
            warmup=chosen.warmup,
            steps=chosen.steps,
            seed=chosen.seed,
            exponent=chosen.exponent,
            text=chosen.text,
            compute=chosen.compute,
            compute_ms=chosen.compute_ms,
            wire_dtype=chosen.wire_dtype if peer.startswith("embrace") else "",
        )
        for peer in chosen.peers
    ]


def traced(chosen: argparse.Namespace, timed: Sequence[Job]) -> list[Job]:
    """The runs that are watched: recording costs time, so they are not among those that are timed."""
    if not chosen.traced_steps:
        return []
    folder = chosen.out.resolve()
    return [
        dataclasses.replace(
            job,
            steps=chosen.traced_steps,
            trace=str(folder / f"trace-{job.model}-{job.ranks}-{job.optimizer}-{job.peer}.json"),
        )
        for job in timed
        if PEERS[job.peer].schedule and job.ranks > 1
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    chosen = parse(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    rate: Any = chosen.rate.split(",") if "," in chosen.rate else chosen.rate
    about = {**machine(), "rate": chosen.rate, "delay": chosen.delay, "command": " ".join(sys.argv)}
    records = []
    with (chosen.out / "records.jsonl").open("w") as log, Preloaded() as preloaded:
        for ranks in chosen.ranks:
            with Cluster(ranks, rate=rate, delay=chosen.delay or None) as cluster:
                about["network"] = cluster.description
                about["rate"] = chosen.rate if cluster.kind == "namespaces" else "none"  # what was had, for the bounds
                for model, optimizer in itertools.product(chosen.models, chosen.optimizers):
                    for repetition in range(chosen.repetitions):
                        timed = jobs(chosen, model, ranks, optimizer)
                        for job in [*timed, *(traced(chosen, timed) if repetition == 0 else [])]:
                            measured = measure(job, cluster, chosen.timeout, preloaded)
                            record = {**measured, "repetition": repetition, **about}
                            records.append(record)
                            log.write(json.dumps(record) + "\n")
                            log.flush()
                            _say(record)
    print(f"\n{write(records, chosen.out, _tokens(chosen))}\n{chosen.out}")


def _tokens(chosen: argparse.Namespace) -> str:
    """Statistics of the batches, since every result depends on them."""
    parts = []
    for model in chosen.models:
        spec = batch_spec(
            model,
            chosen.size,
            *(getattr(chosen, name) or None for name in ("vocabulary", "batch", "length", "negatives")),
        )
        source = make_source(spec, chosen.exponent, chosen.text)
        counted = statistics(spec, source, max(chosen.ranks), steps=3, seed=chosen.seed)
        parts.append(f"#### Batches of {model} on {max(chosen.ranks)} ranks: {source.name}\n\n{tables(counted)}")
    return "\n\n".join(parts)


def _say(record: dict[str, Any]) -> None:
    job, results = record["job"], record["results"]
    errors = [r["error"] for r in results if "error" in r]
    seconds = [s["seconds"] for s in results[0].get("steps", [])]
    traced = ", traced" if job["trace"] else ""
    what = f"did not run: {errors[0][:200]}" if errors else f"{sorted(seconds)[len(seconds) // 2]:.3f} s a step"
    print(f"{job['model']} N={job['ranks']} {job['optimizer']} {job['peer']}{traced}: {what}", flush=True)


if __name__ == "__main__":
    main()
