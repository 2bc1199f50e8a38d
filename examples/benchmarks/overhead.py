"""What ``embrace`` costs where there is nothing to hide: two ranks on loopback, a tiny model, beside ``ddp``.

    python examples/benchmarks/overhead.py                 # medians of a step, and the ratio to ddp
    python examples/benchmarks/overhead.py --profile       # and where rank 0 spends its time under embrace

The peers take turns, and every one is started again each time, so that what else runs on the machine meets all alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.benchmarks.cluster import Cluster  # noqa: E402
from examples.benchmarks.forking import Preloaded  # noqa: E402
from examples.benchmarks.job import Job  # noqa: E402
from examples.benchmarks.run import measure  # noqa: E402

PEERS = ("ddp", "embrace-fifo", "embrace")


def ratios(medians: Mapping[str, Sequence[float]]) -> str:
    """Markdown: each peer's step, and its ratio to ``ddp`` of the same repetition.

    Args:
        medians: By peer, the median step of each repetition, in seconds.
    """
    lines = ["| peer | step, ms (lowest–highest repetition) | ratio to ddp |", "|---|---|---|"]
    for peer, values in medians.items():
        ratio = statistics.median(mine / ddp for mine, ddp in zip(values, medians["ddp"]))
        low, middle, high = (1e3 * value for value in (min(values), statistics.median(values), max(values)))
        lines.append(f"| {peer} | {middle:.2f} ({low:.2f}–{high:.2f}) | {ratio:.3f}× |")
    return "\n".join(lines)


def job(peer: str, chosen: argparse.Namespace, profile: str = "") -> Job:
    """A tiny model."""
    sizes = {"vocabulary": chosen.vocabulary, "dim": chosen.dim, "batch": chosen.batch, "length": chosen.length}
    return Job(peer, chosen.model, ranks=2, warmup=20, steps=chosen.steps, profile=profile, **sizes)


def _median(record: dict[str, Any]) -> float:
    for result in record["results"]:
        if "error" in result:
            raise RuntimeError(f"{record['job']['peer']} did not run: {result.get('traceback', result['error'])}")
    return statistics.median(step["seconds"] for step in record["results"][0]["steps"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lm")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repetitions", type=int, default=5)
    for name, default in (("vocabulary", 10_000), ("dim", 64), ("batch", 16), ("length", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--profile", action="store_true", help="one more run of embrace under cProfile")
    parser.add_argument("--timeout", type=float, default=600.0)
    chosen = parser.parse_args(arguments)
    medians: dict[str, list[float]] = defaultdict(list)
    with Cluster(2, kind="loopback") as cluster, Preloaded() as preloaded:
        for repetition in range(chosen.repetitions):
            for peer in PEERS:
                medians[peer].append(_median(measure(job(peer, chosen), cluster, chosen.timeout, preloaded)))
                print(f"{repetition}: {peer} {medians[peer][-1] * 1e3:.2f} ms", file=sys.stderr, flush=True)
        print(ratios(medians))
        if chosen.profile:
            file = cluster.folder / "profile"
            for peer in ("ddp", "embrace"):
                _median(measure(job(peer, chosen, str(file)), cluster, chosen.timeout, preloaded))
                print(f"\n{peer}, rank 0, {chosen.steps} steps:\n{file.read_text()}")


if __name__ == "__main__":
    main()
