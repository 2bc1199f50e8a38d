"""What is read of a strategy's counters at a step's end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from examples.benchmarks.job import Job
from examples.benchmarks.meter import Meter
from examples.benchmarks.peers.watch import Watch
from lightning_embrace.comm.traffic import Traffic
from lightning_embrace.foresight import Foresight
from lightning_embrace.monitor.timeline import Timeline


def strategy(**more: Any) -> Any:
    """As far as it is watched."""
    foresight = SimpleNamespace(counts={"prior": 3, "delayed": 7, "early": 2, "rest": 1}, planned=[0, 1])
    tables = [SimpleNamespace(unique=2, looked_up=5)] * 2
    session = SimpleNamespace(foresight=foresight, tables=tables, relaxed=True, step=0)
    about = {"_barrier_because": None, "_blind_because": None, "_timeline": None}
    return SimpleNamespace(traffic=Traffic(), _session=session, **{**about, **more})


def test_a_step_counts_what_came_since_the_last() -> None:
    """Payload by kind and direction, and the rows of this step."""
    watched = strategy()
    watch = Watch(watched, 0)
    watch.begin()
    watched.traffic.add("rows", 10, 20)
    assert watch.step()["sent rows"] == 10
    watched.traffic.add("rows", 1, 2)
    step = watch.step()
    assert (step["sent rows"], step["received rows"], step["delayed"], step["tables foreseen"]) == (1, 2, 7, 2)


def test_waiting_is_summed_up_by_step_without_the_first_ones() -> None:
    """Of a traced run; an untraced one says nothing of it."""
    timeline = Timeline(0, 2)
    traced = strategy(_timeline=timeline)
    watch, blank = Watch(traced, warmup=1), Watch(strategy(), warmup=1)
    watch.begin()
    blank.begin()
    for step, seconds in ((0, 9), (1, 2), (2, 3)):
        timeline.at_step(step)
        timeline.waited("wait rows", 0, seconds * 10**9, group="sparse group")
        traced._session.step += 1
        watch.step()
        blank.step()
    watch.end()
    blank.end()
    assert watch.result()["about"]["exposed"] == [2.0, 3.0]
    assert "exposed" not in blank.result()["about"]


def test_counts_stay_with_their_step() -> None:
    """The meter leaves the warm-up's out with its steps."""
    meter = Meter(warmup=1)
    meter.boundary()
    for number in (1, 2, 3):
        meter.loss(0.0)
        meter.count(rows=number)
        meter.boundary()
    assert [step["counts"] for step in meter.result()["steps"]] == [{"rows": 2}, {"rows": 3}]


def test_warm_up_is_longer_than_learning() -> None:
    """The first steps run without look-ahead: timing them would measure another schedule."""
    assert Job("embrace", "lm").warmup >= 4
    assert {"prior", "delayed", "early", "in vain", "rest"} == set(Foresight(None, [], True).counts)  # type: ignore[arg-type]
