"""The emulated cluster itself, where it can be had: what its links carry, how fast, and that nothing is left of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks import calibrate, host, netplan
from examples.benchmarks.cluster import Cluster, LinkBytes, check, run_ranks
from examples.benchmarks.forking import Preloaded
from examples.benchmarks.netplan import Names
from examples.benchmarks.starting import anew
from tests.benchmarks.test_launch import running, wait_until

pytestmark = pytest.mark.network
ROOT = Path(__file__).resolve().parents[2]
_serial = count(1000)  # away from the clusters' own


def names_of_this_process() -> Names:
    owner = host.owner_of(os.getpid())
    assert owner is not None
    return Names(owner, next(_serial))


def ours() -> list[str]:
    """Namespaces of this kind on the machine, but for those of others' live runs."""
    return [
        name
        for name in host.namespaces()
        if (names := netplan.names_of(name)) is not None
        and (names.owner.pid == os.getpid() or host.owner_of(names.owner.pid) != names.owner)
    ]


def of_process(pid: int) -> list[str]:
    """Namespaces of the clusters of one process."""
    found = ((name, netplan.names_of(name)) for name in host.namespaces())
    return [name for name, names in found if names is not None and names.owner.pid == pid]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a namespace."""
    found = host.ability(names_of_this_process())
    if not found.namespaces:
        pytest.skip(f"no network namespaces here: {found.why_not}")
    host.remove_stale()
    yield
    assert ours() == []


def test_links_are_shaped_and_count_what_crosses_them() -> None:
    """A known exchange beside the counters, and transfers over a fast and a slow link.

    How long a transfer takes depends on the machine, so only this is certain: it is not faster than its link, and the
    counted bytes are the payload and its headers, which are less than a tenth.
    """
    with Cluster(3, rate=["200mbit", "200mbit", "100mbit"], kind="namespaces") as cluster:
        hub = calibrate.fastest(cluster)
        plan = {"hub": hub, "sizes": [2_000_000] * 3}
        results = run_ranks(
            cluster, [sys.executable, "-m", "examples.benchmarks.calibrate", json.dumps(plan)], cwd=ROOT, timeout=100
        )
        check(results)
        measured: list[dict[str, Any]] = [json.loads(result.stdout.read_text()) for result in results]
        assert hub == 0
        for rank, limit in ((1, 200e6), (2, 100e6)):
            assert 0 < measured[rank]["up"] <= limit
            assert 0 < measured[hub]["down"][str(rank)] <= limit
        for of_rank in measured:
            for counts in of_rank["collectives"].values():
                for way in ("sent", "received"):
                    assert counts["payload"] < counts[way] < 1.1 * counts["payload"]
        from_outside = cluster.read_link(0)
        assert from_outside is not None and min(from_outside) > 2_000_000
        assert cluster.drops() == 0


@pytest.mark.parametrize("kind", ["anew", "forked"])
def test_a_rank_sees_its_own_link_and_the_others(kind: str) -> None:
    """Its address, what comes in, and its own counters under /sys, which a fork must mount for itself."""
    program = "tests.benchmarks.rank_program"
    with Preloaded() as preloaded, Cluster(2, rate="100mbit", kind="namespaces") as cluster:
        start = anew if kind == "anew" else preloaded.starter(Path(sys.executable), [program], {})
        commands = [[sys.executable, "-m", program, what] for what in ("talk", "facts")]
        talked, looked = (run_ranks(cluster, command, cwd=ROOT, timeout=60, start=start) for command in commands)
        check([*talked, *looked])
        source, length, received = talked[0].stdout.read_text().split()
        assert (source, length) == ("10.77.0.2", "1000")
        assert int(received) >= 1042  # with the headers of UDP, IP and Ethernet
        assert cluster.read_link(1) != LinkBytes(0, 0)
        assert [json.loads(result.stdout.read_text())["interfaces"] for result in looked] == [["eth0", "lo"]] * 2


def test_an_exception_leaves_nothing() -> None:
    built: list[str] = []

    def fail() -> None:
        with Cluster(2, kind="namespaces") as cluster:
            built.extend(netplan.belonging_to(cluster.names, ours()))
            raise ValueError("oh")

    with pytest.raises(ValueError, match="oh"):
        fail()
    assert len(built) == 3  # two ranks and the switch


def test_a_plan_that_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    building = netplan.building

    def broken(names: Names, links: list[netplan.Link]) -> list[list[str]]:
        commands = building(names, links)
        return commands if len(links) == 1 else [*commands[:6], ["ip", "nonsense"], *commands[6:]]

    monkeypatch.setattr(netplan, "building", broken)
    with pytest.raises(host.CommandError, match="ip nonsense: Object"), Cluster(2, kind="namespaces"):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """Ranks end at once; a killed launcher's namespaces go when the next cluster is made."""
    pids = tmp_path / "pids"
    command = [sys.executable, "-m", "examples.benchmarks.cluster", "--kind", "namespaces", "--"]
    command += ["sh", "-c", f"setsid sleep 300 & echo $! >> {pids}; echo $$ >> {pids}; exec sleep 300"]
    launcher = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 4)
    assert len(of_process(launcher.pid)) == 3
    launcher.send_signal(number)
    assert launcher.wait(timeout=20) != 0
    if number == signal.SIGKILL:
        with Cluster(2, kind="namespaces"):
            pass
    assert of_process(launcher.pid) == []
    wait_until(lambda: not any(running(int(pid)) for pid in pids.read_text().split()))


def test_a_live_run_is_left_alone() -> None:
    """Two benchmarks on one machine disturb each other's times, but not their networks."""
    with Cluster(1, kind="namespaces") as first, Cluster(1, kind="namespaces") as second:
        assert host.remove_stale() == []
        assert {first.names.rank(0), second.names.rank(0)} <= set(ours())
