"""The benchmark of fleets: rates, tables, and that what is compared trains the same."""

from __future__ import annotations

from typing import Any

import pytest

from examples.benchmarks.fleet_job import Model
from examples.benchmarks.fleet_throughput import Found, Row, comparisons, markdown, measure, rate_of

TINY = Model(dim=32, layers=12, vocabulary=50, length=8, sequences=2, steps=3)


def note(*times: float) -> dict[str, Any]:
    return {"began": list(times[::2]), "ended": list(times[1::2])}


def test_rates() -> None:
    """Of all models together; those that follow each other are not charged for what is between them."""
    notes = [note(0, 1, 1, 2, 2, 3), note(1, 2, 2, 3, 3, 5)]
    assert rate_of(notes, skip=0, one_by_one=False) == 6 / 5
    assert rate_of(notes, skip=1, one_by_one=False) == 4 / 4
    assert rate_of(notes, skip=0, one_by_one=True) == 6 / 7


def test_table() -> None:
    """Ratios are those of one turn; idle shares are in every row that has leases; losses that differ are shown."""
    whole, shards, plain = Row("whole", 2, 2), Row("shards", 2, 2), Row("plain", 2, 0)
    same, other = [[3.0, 2.0]] * 2, [[3.0, 2.0], [3.0, 2.5]]
    found = {
        whole: [Found(2.0, 0.25, same), Found(1.0, 0.26, same), Found(4.0, 0.27, same)],
        shards: [Found(2.5, 0.0, same), Found(1.3, 0.01, same), Found(6.0, 0.02, same)],
        plain: [Found(1.0, None, other), Found(1.0, None, same), Found(4.0, None, same)],
    }
    lines = markdown("title", list(found), found).splitlines()
    assert lines[4:] == [
        "| whole | 2.00 (1.00–4.00) | 1.00× | 26% | equal |",
        "| shards | 2.50 (1.30–6.00) | 1.30× | 1% | equal |",
        "| plain | 1.00 (1.00–4.00) | 1.00× | – | **not equal** |",
    ]


def test_what_is_compared() -> None:
    """Whole models and shards have the same seats and threads, and half as many models again as devices."""
    for title, (rows, sleeps, _) in comparisons(threads=1).items():
        if "whole models" in rows[0].name:
            whole, shards = rows[:2]
            assert (whole.policy, shards.policy) == ("task", "lrtf") and 2 * whole.models == 3 * whole.devices
            assert (whole.live, whole.memory, whole.threads) == (shards.live, shards.memory, shards.threads)
        assert sleeps == ("emulated" in title)


@pytest.mark.matrix
def test_measures() -> None:
    """Fleets and plain processes train the same, bit by bit; under the budget models are spilled."""
    rows = [Row("plain", 2, 0), Row("tasks", 2, 2, memory=1.0), Row("shards", 3, 2, memory=1.5)]
    found = {row: [measure(row, TINY)] for row in rows}
    assert "not equal" not in markdown("", rows, found)
    assert [turn.idle is None for (turn,) in found.values()] == [True, False, False]
    sleeping = Row("sleeping", 2, 1, memory=1.0)
    (first, second) = measure(sleeping, Model(dim=16, layers=12, steps=3, sleep=0.001)).losses
    assert first == second and len(first) == 3
