"""An emulated cluster on one machine: network namespaces on a bridge, every link shaped to a rate.

    python -m examples.benchmarks.cluster --ranks 4 --rate 100mbit -- python train.py    # once per namespace
    python -m examples.benchmarks.cluster --ranks 4 --rate 1gbit,1gbit,1gbit,100mbit     # no command: calibrate it

From Python::

    with Cluster(4, rate="100mbit") as cluster:
        check(run_ranks(cluster, [sys.executable, "train.py"]))
"""

from __future__ import annotations

import argparse
import sys

from examples.benchmarks import calibrate, host
from examples.benchmarks.counters import LinkBytes, LinkCounters
from examples.benchmarks.emulated import Cluster
from examples.benchmarks.launch import RankResult, RanksFailed, check, run_ranks

__all__ = ["Cluster", "LinkBytes", "LinkCounters", "RankResult", "RanksFailed", "check", "run_ranks"]


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="namespaces (default: %(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of each link and direction; by rank: a,b,… (%(default)s)")
    parser.add_argument("--delay", default="0", help="of each link and direction; by rank: a,b,… (%(default)s)")
    parser.add_argument("--kind", choices=["auto", "namespaces", "loopback"], default="auto")
    parser.add_argument("--layout", choices=["nodes", "local"], default="nodes", help="N nodes × 1 device, or 1 × N")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds until all are killed (%(default)s)")
    parser.add_argument("--clean", action="store_true", help="only remove what killed runs left")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --; none: calibrate")
    arguments = parser.parse_args(argv)
    arguments.command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run as the command line says; 0 when every rank returned 0."""
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    if arguments.clean:
        print("removed:", ", ".join(names.cluster for names in host.remove_stale()) or "nothing was left")
        return 0
    rate, delay = arguments.rate.split(","), arguments.delay.split(",")
    with Cluster(arguments.ranks, rate, delay, arguments.kind) as cluster:
        print(cluster.description, file=sys.stderr)
        if not arguments.command:
            print(calibrate.measure(cluster, arguments.timeout))
            return 0
        results = run_ranks(cluster, arguments.command, timeout=arguments.timeout, layout=arguments.layout)
        for result in results:
            for stream, file in ((sys.stdout, result.stdout), (sys.stderr, result.stderr)):
                for line in file.read_text(errors="replace").splitlines():
                    print(f"{result.rank}| {line}", file=stream)
        for result in results:
            if result.returncode != 0:
                print(result.describe(lines=0), file=sys.stderr)
        return int(any(result.returncode != 0 for result in results))


if __name__ == "__main__":
    sys.exit(main())
