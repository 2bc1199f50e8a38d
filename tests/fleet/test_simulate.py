"""How long fleets take under each policy, with the lease book that real fleets have."""

from __future__ import annotations

import random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_embrace.fleet.lease import Lease
from lightning_embrace.fleet.policy import POLICIES
from lightning_embrace.fleet.simulate import Estimate, exact, measured, simulate
from tests.fleet.optimum import optimum

SHARDS = st.lists(st.floats(0.1, 3.0), min_size=1, max_size=8)
FLEET = st.lists(SHARDS, min_size=1, max_size=7)


def bound(tasks: list[list[float]], devices: int) -> float:
    """No schedule is shorter."""
    return max(sum(map(sum, tasks)) / devices, *map(sum, tasks))


def test_three_models_of_four_shards_on_two_devices() -> None:
    """12: all devices work for one model, one shard at a time. 8: whole models pack badly. 6: shards do not."""
    tasks = [[1.0] * 4] * 3
    assert simulate(tasks, 1, "task").makespan == 12.0
    assert simulate(tasks, 2, "task").makespan == 8.0
    assert simulate(tasks, 2, "lrtf").makespan == 6.0


def fleets(kind: str, count: int, largest: int) -> list[tuple[list[list[int]], int]]:
    """Tasks in whole steps, and devices. Shards of equal length, or of one to three steps."""
    made = []
    for seed in range(count):
        draw = random.Random(f"{kind} {seed}").randint
        lengths = [draw(1, largest) for _ in range(draw(3, 5))]
        made.append(([[1 if kind == "unit" else draw(1, 3) for _ in range(n)] for n in lengths], draw(2, 3)))
    return made


def over_optimum(kind: str, count: int, largest: int) -> list[float]:
    ratios = []
    for tasks, devices in fleets(kind, count, largest):
        reached = simulate(tasks, devices, "lrtf").makespan
        ratios.append(reached / optimum(tasks, devices, horizon=round(reached)))
    return ratios


def test_lrtf_is_near_the_optimum() -> None:
    """At most 5 % above what an exact solver proves: each where shards take one step, on average where they do not."""
    assert max(over_optimum("unit", 12, largest=6)) <= 1.05
    assert mean(over_optimum("mixed", 12, largest=4)) <= 1.05


@pytest.mark.matrix
def test_lrtf_is_near_the_optimum_of_larger_fleets() -> None:
    """As above."""
    assert max(over_optimum("unit", 200, largest=10)) <= 1.05
    assert mean(over_optimum("mixed", 200, largest=7)) <= 1.05


@pytest.mark.parametrize(
    ("tasks", "devices", "whole"), [(12, 8, 4 / 3), (9, 8, 16 / 9), (96, 64, 4 / 3), (65, 64, 1.97)]
)
def test_alternating_packs_what_whole_models_do_not(tasks: int, devices: int, whole: float) -> None:
    """Equal models: whole ones leave devices idle in the last round, shards do not."""
    shards = [[1.0] * 64] * tasks
    assert simulate(shards, devices, "task").makespan / bound(shards, devices) == pytest.approx(whole, abs=0.001)
    assert simulate(shards, devices, "lrtf").makespan / bound(shards, devices) <= 1.01


def test_times_that_are_measured_do_as_well() -> None:
    """Before its first shard a task knows nothing, then the mean of what was: that is enough."""
    draw = random.Random(0)
    tasks = [[draw.uniform(0.5, 1.5) for _ in range(draw.randint(40, 160))] for _ in range(24)]
    assert simulate(tasks, 16, "lrtf", estimate=measured).makespan <= 1.02 * bound(tasks, 16)


@settings(max_examples=150, deadline=None)
@given(
    FLEET,
    st.integers(1, 4),
    st.sampled_from(list(POLICIES)),
    st.one_of(st.none(), st.integers(1, 4)),
    st.sampled_from([None, 0.5, 3.0]),
    st.sampled_from([exact, measured]),
)
def test_every_task_comes_to_its_end(
    tasks: list[list[float]],
    devices: int,
    policy: str,
    max_live: int | None,
    max_wait: float | None,
    estimate: Estimate,
) -> None:
    """Whoever asks is granted in the end, under every policy, and computes all of its shards and no more."""
    run = simulate(tasks, devices, policy, max_live=max_live, max_wait=max_wait, estimate=estimate)
    for index, shards in enumerate(tasks):
        held = sum(lease.end - lease.start for lease in run.leases if lease.task == f"t{index}")
        assert held == pytest.approx(sum(shards))
    at_least = bound(tasks, devices)
    assert at_least - 1e-9 <= run.makespan <= sum(map(sum, tasks)) + 1e-9


def longest_wait(leases: list[Lease], task: str) -> float:
    """Seconds. All tasks ask at 0, and at once when they give."""
    own = sorted((lease for lease in leases if lease.task == task), key=lambda lease: lease.start)
    return max(lease.start - before for before, lease in zip([0.0, *(lease.end for lease in own)], own))


@settings(max_examples=100, deadline=None)
@given(FLEET, st.integers(1, 3), st.sampled_from(["lrtf", "fifo", "random"]), st.sampled_from([0.0, 1.0, 4.0]))
def test_max_wait_bounds_waiting(tasks: list[list[float]], devices: int, policy: str, max_wait: float) -> None:
    """Whoever is late waits for one shard of each of those that are later at most."""
    run = simulate(tasks, devices, policy, max_wait=max_wait)
    allowed = max_wait + len(tasks) * max(map(max, tasks))
    for index in range(len(tasks)):
        assert longest_wait(run.leases, f"t{index}") <= allowed


def test_without_max_wait_short_tasks_wait_for_long_ones() -> None:
    """What the bound above is worth: under lrtf a short task waits until the long one is as short."""
    tasks = [[1.0] * 30, [1.0] * 2]
    assert longest_wait(simulate(tasks, 1).leases, "t1") == 28.0 + 1.0
    assert longest_wait(simulate(tasks, 1, max_wait=4.0).leases, "t1") == 5.0


def test_waiting_tasks_join_when_seats_are_free() -> None:
    """max_live: no more tasks than that ever have leases that are not over yet."""
    tasks = [[1.0] * 3] * 6
    leases = simulate(tasks, 2, max_live=3).leases
    first = {f"t{i}": min(lease.start for lease in leases if lease.task == f"t{i}") for i in range(6)}
    last = {f"t{i}": max(lease.end for lease in leases if lease.task == f"t{i}") for i in range(6)}
    for moment in {lease.start for lease in leases}:
        assert sum(first[task] <= moment < last[task] for task in first) <= 3


def test_a_large_fleet_is_packed_as_well() -> None:
    """200 tasks on 64 devices; nobody is granted a device more often than it has shards."""
    draw = random.Random(0)
    tasks = [[draw.uniform(0.5, 1.5) for _ in range(draw.randint(5, 40))] for _ in range(200)]
    run = simulate(tasks, 64)
    assert len(run.leases) <= sum(map(len, tasks))
    assert run.makespan <= 1.05 * bound(tasks, 64)
