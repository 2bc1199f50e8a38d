"""Reading what a link carried."""

from pathlib import Path

import pytest

from examples.benchmarks.counters import LinkBytes, LinkCounters, parse_drops, parse_link

LINK = """[{"ifindex":2,"link_index":3,"ifname":"eth0","flags":["BROADCAST","UP"],"mtu":1500,"qdisc":"tbf",
"stats64":{"rx":{"bytes":5592404,"packets":12,"errors":0,"dropped":0},"tx":{"bytes":90,"packets":1}}}]"""

QUEUES = """[{"kind":"tbf","handle":"1:","root":true,"options":{"rate":12500000},"bytes":90,"packets":1,"drops":3},
{"kind":"netem","handle":"2:","parent":"1:1","bytes":90,"packets":1,"drops":2},
{"kind":"noqueue","handle":"0:","root":true,"bytes":0,"packets":0,"drops":7},{"kind":"tbf","handle":"1:"}]"""


def test_what_ip_prints() -> None:
    assert parse_link(LINK) == LinkBytes(sent=90, received=5592404)


def test_drops_of_the_shapers_alone_count() -> None:
    assert parse_drops(QUEUES) == 5
    assert parse_drops("[]") == 0


def test_readings_follow_the_files(tmp_path: Path) -> None:
    """The files are opened once; each reading must see them as they are then."""
    statistics = tmp_path / "eth0" / "statistics"
    statistics.mkdir(parents=True)
    sent, received = statistics / "tx_bytes", statistics / "rx_bytes"
    sent.write_text("10\n")
    received.write_text("999\n")
    counters = LinkCounters("eth0", root=tmp_path)
    before = counters.read()
    sent.write_text("1000000000000\n")
    received.write_text("1001\n")
    assert counters.read().since(before) == LinkBytes(999_999_999_990, 2)
    counters.close()


def test_on_loopback_a_rank_has_no_link_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters of lo are those of all ranks, and of everybody else on the machine."""
    monkeypatch.delenv("BENCHMARK_INTERFACE", raising=False)
    assert LinkCounters.of_this_rank() is None
    monkeypatch.setenv("BENCHMARK_INTERFACE", "lo")
    counters = LinkCounters.of_this_rank()
    assert counters is not None and counters.read().sent >= 0
    counters.close()
