"""Checks an emulated cluster by what a transfer gets, and by what the links count of a known payload.

Started without a command, ``python -m examples.benchmarks.cluster`` prints this.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.benchmarks.emulated import Cluster
from examples.benchmarks.launch import check, run_ranks
from examples.benchmarks.rates import show_rate

_ROOT = Path(__file__).resolve().parents[2]
_TRANSFER = 10_000_000  # bytes
_TARGET_S = 2.0  # a slow link carries less, for as long as this
_PAYLOAD = 4 << 20


def measure(cluster: Cluster, timeout: float = 300.0) -> str:
    """Runs the calibration on all ranks and returns the report."""
    hub = fastest(cluster)
    sizes = [_transfer_size(cluster, hub, rank) for rank in range(cluster.ranks)]
    command = [sys.executable, "-m", "examples.benchmarks.calibrate", json.dumps({"hub": hub, "sizes": sizes})]
    results = run_ranks(cluster, command, [{"OMP_NUM_THREADS": "1"}] * cluster.ranks, timeout, cwd=_ROOT)
    check(results)
    return report(cluster, hub, [json.loads(result.stdout.read_text()) for result in results], cluster.drops())


def fastest(cluster: Cluster) -> int:
    """The rank that the others are measured against, so that each one's own link is the bottleneck."""
    return max(range(cluster.ranks), key=lambda rank: cluster.links[rank].rate or float("inf"))


def expected_rate(cluster: Cluster, a: int, b: int) -> int | None:
    """The slower of two links."""
    rates = [cluster.links[rank].rate for rank in (a, b)]
    return min((rate for rate in rates if rate is not None), default=None) if cluster.kind == "namespaces" else None


def _transfer_size(cluster: Cluster, a: int, b: int) -> int:
    rate = expected_rate(cluster, a, b)
    return _TRANSFER if rate is None else min(_TRANSFER, int(rate / 8 * _TARGET_S))


def report(cluster: Cluster, hub: int, measured: list[dict[str, Any]], drops: int) -> str:
    """A table of the links and one of the collectives."""
    lines = [f"Payload rate of one transfer of up to {_TRANSFER / 1e6:g} MB, to and from rank {hub}", ""]
    lines += ["| rank | asked | up | down | share of asked |", "|---|---|---|---|---|"]
    for rank, of_rank in enumerate(measured):
        if rank == hub:
            continue
        asked = expected_rate(cluster, hub, rank)
        up, down = of_rank["up"], measured[hub]["down"][str(rank)]
        share = f"{up / asked:.1%}, {down / asked:.1%}" if asked else "–"
        lines.append(f"| {rank} | {show_rate(asked)} | {show_rate(up)} | {show_rate(down)} | {share} |")
    lines += ["", f"Bytes of a rank's link beside the payload (rank {hub})", ""]
    lines += ["| exchange | payload | sent | received | more than payload |", "|---|---|---|---|---|"]
    for name, counts in measured[hub]["collectives"].items():
        payload, sent, received = counts["payload"], counts["sent"], counts["received"]
        more = f"{sent / payload - 1:+.2%}, {received / payload - 1:+.2%}" if payload and sent else "–"
        lines.append(f"| {name} | {payload} | {sent or '–'} | {received or '–'} | {more} |")
    lines += ["", f"Packets dropped by the shapers: {drops}"]
    return "\n".join(lines)


def _on_rank(hub: int, sizes: list[int]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from examples.benchmarks.counters import LinkBytes, LinkCounters

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(1)
    own: dict[str, Any] = {"up": 0.0, "down": {}, "collectives": {}}

    def send(to: int, size: int) -> float:
        """Payload bits per second, until the other one has said that it has all."""
        data = torch.zeros(size, dtype=torch.uint8)
        start = time.perf_counter()
        dist.send(data, to)
        dist.recv(received, to)
        return size * 8 / (time.perf_counter() - start)

    def receive(source: int, size: int) -> None:
        dist.recv(torch.zeros(size, dtype=torch.uint8), source)
        dist.send(received, source)

    for other in range(ranks):
        if other == hub:
            continue
        for size in (100_000, sizes[other]):  # the first one opens TCP's window
            dist.barrier()
            if rank == other:
                own["up"] = send(hub, size)
                receive(hub, size)
            elif rank == hub:
                receive(other, size)
                own["down"][other] = send(other, size)

    counters = LinkCounters.of_this_rank()

    def count(name: str, payload: int, exchange: Callable[[], Any]) -> None:
        before = counters.read() if counters else LinkBytes(0, 0)
        dist.barrier()  # nobody sends before all have read; the barriers' own bytes are counted, and few
        exchange()
        dist.barrier()  # what this rank sent has arrived, so it has been counted
        sent, got = (counters.read() if counters else LinkBytes(0, 0)).since(before)
        own["collectives"][name] = {"payload": payload, "sent": sent, "received": got}

    share = _PAYLOAD * (ranks - 1) // ranks
    data = torch.zeros(_PAYLOAD // ranks * ranks // 4)
    count("all_reduce", 2 * share, lambda: dist.all_reduce(data))
    count("all_to_all", share, lambda: dist.all_to_all_single(torch.empty_like(data), data))
    dist.barrier()
    dist.destroy_process_group()
    return own


if __name__ == "__main__":
    print(json.dumps(_on_rank(**json.loads(sys.argv[1]))))
