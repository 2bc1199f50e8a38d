"""Horovod and TorchRec, each in its environment, do the work that ``ddp`` does."""

from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import pytest

from examples.benchmarks.cluster import Cluster
from examples.benchmarks.forking import Preloaded
from examples.benchmarks.job import Job
from examples.benchmarks.peers import PEERS
from examples.benchmarks.run import measure

pytestmark = pytest.mark.peers
SETTINGS = [("lm", 2), ("bert", 2), ("gnmt", 3), ("transformer", 3)]
OTHERS = [name for name, peer in PEERS.items() if peer.environment != "main"]


def job(peer: str, model: str, ranks: int, optimizer: str = "sgd") -> Job:
    """Small; the width divides among 2 and 3 ranks into the multiples of 4 that TorchRec needs."""
    return Job(
        peer, model, ranks=ranks, optimizer=optimizer, vocabulary=2000, dim=48, batch=2, length=8, warmup=2, steps=3
    )


def losses(record: dict[str, Any]) -> list[float]:
    """Mean over the ranks, by step."""
    for result in record["results"]:
        assert "error" not in result, result.get("traceback", result["error"])
    by_rank = [result["losses"] for result in record["results"]]
    assert [len(values) for values in by_rank] == [5] * len(by_rank)
    return [fmean(step) for step in zip(*by_rank)]


@pytest.fixture(scope="module")
def preloaded() -> Iterator[Preloaded]:
    """Interpreters that have imported everything."""
    with Preloaded() as servers:
        yield servers


@pytest.fixture(scope="module")
def ddp(preloaded: Preloaded) -> Callable[..., list[float]]:
    """Losses of ``ddp``, measured once per setting."""
    known: dict[Job, list[float]] = {}

    def get(*setting: Any) -> list[float]:
        wanted = job("ddp", *setting)
        if wanted not in known:
            with Cluster(wanted.ranks, kind="loopback") as cluster:
                known[wanted] = losses(measure(wanted, cluster, 120, preloaded))
        return known[wanted]

    return get


@pytest.mark.parametrize("peer", OTHERS)
@pytest.mark.parametrize(("model", "ranks"), SETTINGS)
def test_same_losses_as_ddp(
    peer: str, model: str, ranks: int, ddp: Callable[..., list[float]], preloaded: Preloaded
) -> None:
    """Weights start equal, and dense and table gradients are averaged over the ranks as ``ddp`` does."""
    with Cluster(ranks, kind="loopback") as cluster:
        record = measure(job(peer, model, ranks), cluster, 120, preloaded)
    assert losses(record) == pytest.approx(ddp(model, ranks), rel=1e-5)


@pytest.mark.parametrize("peer", [name for name in OTHERS if "adagrad" in PEERS[name].optimizers])
def test_same_losses_as_ddp_with_adagrad(peer: str, ddp: Callable[..., list[float]], preloaded: Preloaded) -> None:
    """A sparse gradient whose equal ids are not summed gives SGD the same numbers, and Adagrad others."""
    with Cluster(2, kind="loopback") as cluster:
        record = measure(job(peer, "lm", 2, "adagrad"), cluster, 120, preloaded)
    assert losses(record) == pytest.approx(ddp("lm", 2, "adagrad"), rel=1e-5)


@pytest.mark.network
@pytest.mark.parametrize("peer", OTHERS)
def test_runs_on_emulated_links(peer: str, ddp: Callable[..., list[float]], preloaded: Preloaded) -> None:
    """The exchange goes over the rank's link, where it is counted, and not around it."""
    with Cluster(2, rate="100mbit") as cluster:
        if cluster.kind != "namespaces":
            pytest.skip(cluster.describe())
        record = measure(job(peer, "lm", 2), cluster, 120, preloaded)
    assert losses(record) == pytest.approx(ddp("lm", 2), rel=1e-5)
    for result in record["results"]:
        # rows of two tables: more than the ids or a heartbeat, less than ten dense tables
        assert all(20_000 < step["sent"] < 8_000_000 for step in result["steps"]), result["steps"]
