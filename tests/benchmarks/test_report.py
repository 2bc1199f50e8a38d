"""The benchmark's tables say what was measured."""

from __future__ import annotations

import dataclasses
import json

import pytest

from examples.benchmarks.job import Job
from examples.benchmarks.report import Row, bound, level, losses_agree, markdown, quartiles, summarise, volumes


def record(peer, seconds, losses=(2.0, 1.0), ranks=2, error=None, counted=None):
    """One job with constant steps, as run.py writes it."""
    step = {"seconds": 0.0, "cpu": 0.25, "sent": 100, "received": 100, "loss": 1.0}
    results = [
        {"error": error}
        if error
        else {
            "steps": [{**step, "seconds": s, "sent": 100 * (r + 1)} for s in seconds],
            "losses": [loss + r for loss in losses],
            "peak_rss": 1_000_000 * (r + 1),
            **({"counted": counted} if counted else {}),
        }
        for r in range(ranks)
    ]
    return {"job": json.loads(Job(peer, "lm", ranks=ranks).to_json()), "results": results}


def test_a_row_holds_medians_over_repetitions_and_the_worst_rank():
    """Two repetitions become one row; bytes and memory are those of the rank that has most."""
    (row,) = summarise([record("embrace", [1.0, 2.0]), record("embrace", [3.0, 4.0, 5.0])])
    assert row.seconds == (2.0, 3.0, 4.0)
    assert row.sent == 200
    assert row.memory == 2_000_000
    assert row.cpu == 0.5
    assert row.losses == (2.5, 1.5)


def test_a_peer_that_cannot_run_is_listed_with_its_error():
    """Never dropped: the table says why."""
    rows = summarise([record("embrace", [1.0]), record("ddp", [1.0], error="ValueError: no | such\nthing")])
    text = markdown(rows, 0)
    assert "| ddp, dense gradients | did not run: ValueError: no \\| such thing |" in text


def test_ratios_are_to_embrace():
    """3 s against 1.5 s is 2.00×, and the bound is the larger of compute and bytes over bandwidth."""
    rows = summarise([record("embrace", [1.5]), record("ddp", [3.0]), record("none", [0.5])])
    line = next(row for row in markdown(rows, bytes_per_second=200).splitlines() if row.startswith("| ddp,"))
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[3] == "2.00×"
    assert cells[6] == "1.000"  # 200 bytes at 200 bytes a second, not the 0.5 s of compute
    assert cells[7] == "3.00"
    assert cells[10] == "yes"


@pytest.mark.parametrize(("losses", "same"), [((2.0, 1.0), True), ((2.0, 1.1), False)])
def test_different_losses_are_no_comparison(losses, same):
    """A peer whose curve differs did other work, and the table says so."""
    ours, theirs = summarise([record("embrace", [1.0]), record("ddp", [1.0], losses=losses)])
    assert losses_agree(theirs, ours, 1e-6) is same
    assert ("**no**" in markdown([ours, theirs], 0)) is not same


def test_a_row_without_losses_agrees_with_nothing():
    """No measurement is not the same work."""
    row = Row("ddp", "lm", 2, "sgd")
    assert not losses_agree(row, row, 1.0)


def test_level_takes_the_part_of_the_ranks_out():
    """Rows and gradients times N/(N−1) is what must not grow with N; ids stand apart."""
    counted = {"sent": {"rows": 300, "grads": 300, "ids": 40}, "received": {}, "steps": 2}
    (row,) = summarise([record("embrace", [1.0], ranks=4, counted=counted)])
    assert level(row) == pytest.approx(300 * 4 / 3)
    assert "| lm | 4 | embrace | 0.0004 | 0.0000 |" in volumes([row])


def test_quartiles_of_one_value():
    """A single step is its own median."""
    assert quartiles([2.0]) == (2.0, 2.0, 2.0)


def test_bound_without_a_shaped_link_is_compute():
    """Nothing is known of the bandwidth then."""
    assert bound(0.5, 1e9, 0) == 0.5


def test_a_job_survives_the_command_line():
    """Ranks get exactly what run.py decided."""
    job = Job("ddp", "gnmt", ranks=4, exponent=1.3, wire_dtype="bf16")
    assert Job.from_json(job.to_json()) == job
    assert job.same_work_as(dataclasses.replace(job, peer="embrace", wire_dtype=""))
    assert not job.same_work_as(dataclasses.replace(job, seed=7))
