"""Which unit lives where: sizes in, places out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from lightning_embrace.hydra.pilot import Pilot
from lightning_embrace.hydra.plan import Budget, DoesNotFitError, UnitCost, make_plan
from lightning_embrace.hydra.sizes import parse_bytes
from lightning_embrace.hydra.traffic import traffic

UNITS = [UnitCost(f"blocks.{i}", 100, 100, 200, activations=40, calls=1) for i in range(5)]
BUDGET = Budget(device=3000, host=10_000, disk=False, glue=100, working=100, prefetch=True, spilled_gradients=False)


def test_everything_fits() -> None:
    """Nothing moves, and activations are kept: a model that fits pays nothing."""
    plan = make_plan(UNITS, BUDGET)
    assert set(plan.places) == {"device"} and all(plan.kept) and plan.shards == ()
    assert plan.device_bytes == 100 + 100 + 5 * 400 + 5 * 40


def test_activations_are_kept_from_the_end_while_there_is_room() -> None:
    plan = make_plan(UNITS, replace(BUDGET, device=2200 + 80))
    assert plan.kept == (False, False, False, True, True)


def test_what_was_not_measured_is_not_kept() -> None:
    assert not any(make_plan([replace(u, calls=0) for u in UNITS], BUDGET).kept)


def test_two_slots_and_what_is_left_stays() -> None:
    """Room for two shards, weights and states, with their gradients; the last blocks that fit beside them stay."""
    units = [replace(u, calls=0, activations=0) for u in UNITS]
    plan = make_plan(units, replace(BUDGET, device=200 + 2 * 400 + 450))
    assert (plan.slots, plan.slot_bytes, plan.gradient_bytes) == (2, 300, 100)
    assert plan.places == ("host",) * 4 + ("device",)
    assert plan.kept == (False,) * 5
    assert plan.shards == ((0,), (1,), (2,), (3,))
    assert plan.host_bytes == 4 * 300
    assert plan.device_bytes == 200 + 2 * 400 + 400


def test_activations_come_before_blocks_that_stay() -> None:
    """What is computed again costs a third of a step; what moves is moved meanwhile. What is left holds blocks."""
    budget = replace(BUDGET, device=200 + 2 * 400)
    for left, kept, places in (
        (100, (False, False, False, True, True), ("host",) * 5),
        (599, (True,) * 5, ("host",) * 5),
        (600, (True,) * 5, ("host",) * 4 + ("device",)),
    ):
        plan = make_plan(UNITS, replace(budget, device=budget.device + left))
        assert (plan.kept, plan.places) == (kept, places), left
        assert plan.activations == (40,) * 5
        taken = 40 * sum(kept) + 400 * places.count("device")
        assert plan.device_bytes == budget.device + taken <= budget.device + left


def test_one_slot_where_two_do_not_fit() -> None:
    """Then nothing can be loaded ahead."""
    assert make_plan(UNITS, replace(BUDGET, device=200 + 799)).slots == 1


def test_small_neighbours_move_together() -> None:
    """A slot is as large as the largest unit, and smaller ones share it."""
    units = [*(replace(u, weights=30, gradients=30, states=60) for u in UNITS), *UNITS]
    plan = make_plan(units, replace(BUDGET, device=200 + 800))
    assert plan.shards == ((0, 1, 2), (3, 4), (5,), (6,), (7,), (8,), (9,))


def test_host_and_disk_take_turns() -> None:
    budget = replace(BUDGET, device=1000, host=700 + 50, disk=True)
    plan = make_plan(UNITS, budget)
    assert plan.places == ("disk", "host", "disk", "host", "disk")
    assert (plan.host_bytes, plan.disk_bytes) == (600, 900)
    assert make_plan(UNITS, replace(budget, spilled_gradients=True)).places == ("disk", "disk", "host", "disk", "disk")
    assert set(make_plan(UNITS, replace(budget, host=1500)).places) == {"host"}


def test_a_block_over_the_budget() -> None:
    """The error names the block, what it takes and what would be enough; and that is enough."""
    units = [*UNITS, replace(UNITS[0], name="huge", weights=1000)]
    for budget in (BUDGET, replace(BUDGET, unmeasured=0.25, working=200)):
        with pytest.raises(DoesNotFitError, match=r"'huge' takes 1\.27 KiB .*blocks=") as caught:
            make_plan(units, replace(budget, device=900))
        said = parse_bytes("device_memory", re.search(r"Give device_memory='(.*?)'", str(caught.value))[1])
        # until it is measured, what computing takes is a share of what there is
        working = int(0.25 * (said - 100)) if budget.unmeasured else 100
        make_plan(units, replace(budget, device=said, working=working))
        assert said < 1.02 * (100 + (1300 / 0.75 if budget.unmeasured else 1400))


def test_a_host_that_is_too_small() -> None:
    with pytest.raises(DoesNotFitError, match="disk='/path'"):
        make_plan(UNITS, replace(BUDGET, device=1000, host=700))


def test_traffic() -> None:
    """The first two and the last two are in the slots when they are needed again; each has its states read once."""
    plan = make_plan(UNITS, replace(BUDGET, device=1000))
    assert len(plan.shards) == 5 and plan.slots == 2
    read = 5 * 200 + (10 - 2 - 2) * 100
    assert traffic(UNITS, plan, second_pass=False) == {"host read": read, "host written": 5 * (100 + 200)}
    read = 5 * 300 + (15 - 2 - 2) * 100
    assert traffic(UNITS, plan, second_pass=True) == {"host read": read, "host written": 5 * (100 + 200 + 100)}


def test_traffic_by_tier() -> None:
    """What does not fit the host is read from the disk, and written there."""
    plan = make_plan(UNITS, replace(BUDGET, device=1000, host=700 + 50, disk=True))
    assert plan.places == ("disk", "host", "disk", "host", "disk")
    moved = traffic(UNITS, plan, second_pass=False)
    # the first two are in the slots when a step begins, and the last two when forward turns into backward
    assert moved["host read"] == 2 * 200 + 2 * 100 and moved["host written"] == 2 * 300
    assert moved["disk read"] == 3 * 200 + 4 * 100 and moved["disk written"] == 3 * 300


def test_a_model_without_blocks() -> None:
    """There is nothing that could be moved; the error says what is needed."""
    assert make_plan([], BUDGET).shards == ()
    with pytest.raises(DoesNotFitError, match=r"no blocks .*takes 100 B.*device_memory='201 B'.*nn\.Linear"):
        make_plan([], replace(BUDGET, device=150))


def test_no_room_on_the_host_is_left_over() -> None:
    """Small units fill what large ones have left."""
    units = [replace(UNITS[0], weights=w, gradients=w, states=0) for w in (100, 500, 500, 100)]
    plan = make_plan(units, Budget(1100, 800, True, 0, 0, False, False))
    assert plan.places == ("host", "disk", "host", "host") and (plan.host_bytes, plan.disk_bytes) == (700, 500)


def test_gradients_on_their_way_to_the_store_take_room() -> None:
    """A unit's weights once more, or as much as is moved at a time: exactly what was free for a second slot."""
    budget = replace(BUDGET, device=200 + 2 * 400, spilled_gradients=True)
    assert make_plan(UNITS, budget).slots == 1
    assert make_plan(UNITS, replace(budget, device=budget.device + 100)).slots == 2
    assert make_plan(UNITS, replace(budget, spilled_gradients=False)).slots == 2


def test_what_computing_takes() -> None:
    """Backward of the largest call or the optimizer's step, whichever is more, beside what waits meanwhile."""
    pilot = Pilot(torch.device("cpu"))
    pilot.largest, pilot.outside = 1000, 70
    pilot.inputs.update({"a": 10, "b": 20})
    assert pilot.working(stepping=100) == 1500 + 70 + 30
    assert pilot.working(stepping=2000) == 2000 + 70 + 30
    assert pilot.guess(2).working(stepping=100) == 2 * (1500 + 70 + 30)


def test_what_a_larger_batch_may_take() -> None:
    """It was not run, so nothing is said to be worth keeping; once it was, the larger of both counts."""
    pilot, other = Pilot(torch.device("cpu")), Pilot(torch.device("cpu"))
    for measured, a, b in ((pilot, 100, 40), (other, 70, 50)):
        measured.activations.update({"a": a, "b": b})
        measured.calls.update({"a": 1, "b": 1})
        measured.largest = max(a, b)
    guess = pilot.guess(3)
    assert guess.activations == {"a": 300, "b": 120} and not guess.calls and guess.largest == 300
    pilot.include(other)
    assert pilot.activations == {"a": 100, "b": 50} and pilot.calls == {"a": 1, "b": 1} and pilot.largest == 100
