"""What the calibration reports."""

from examples.benchmarks import calibrate
from examples.benchmarks.cluster import Cluster


def test_report_sets_each_link_beside_what_was_asked() -> None:
    cluster = Cluster(3, rate=["50mbit", "100mbit", "100mbit"])
    cluster.kind = "namespaces"
    hub = calibrate.fastest(cluster)
    counts = {"all_to_all": {"payload": 1000, "sent": 1030, "received": 1005}}
    measured = [
        {"up": 47.5e6, "down": {}, "collectives": counts},
        {"up": 0.0, "down": {"0": 48e6, "2": 90e6}, "collectives": counts},
        {"up": 95e6, "down": {}, "collectives": counts},
    ]
    lines = calibrate.report(cluster, hub, measured, drops=0).splitlines()
    assert hub == 1
    assert "| 0 | 50 Mbit/s | 47.5 Mbit/s | 48 Mbit/s | 95.0%, 96.0% |" in lines
    assert "| 2 | 100 Mbit/s | 95 Mbit/s | 90 Mbit/s | 95.0%, 90.0% |" in lines
    assert "| all_to_all | 1000 | 1030 | 1005 | +3.00%, +0.50% |" in lines
    assert lines[-1] == "Packets dropped by the shapers: 0"


def test_on_loopback_there_is_nothing_to_hold_it_against() -> None:
    cluster = Cluster(2, rate="50mbit", kind="loopback")
    measured = [
        {"up": 0.0, "down": {"1": 8e9}, "collectives": {"all_reduce": {"payload": 1000, "sent": 0, "received": 0}}},
        {"up": 9e9, "down": {}, "collectives": {}},
    ]
    lines = calibrate.report(cluster, 0, measured, drops=0).splitlines()
    assert "| 1 | not shaped | 9 Gbit/s | 8 Gbit/s | – |" in lines
    assert "| all_reduce | 1000 | – | – | – |" in lines
