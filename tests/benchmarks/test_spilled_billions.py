"""The runs with billions of parameters, without running them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from examples.benchmarks.spilled_billions import RUNS, check_disk, job_of, markdown, plain_bytes
from examples.benchmarks.spilled_gpt import parameters_of


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_as_large_as_they_say(name: str) -> None:
    """Enough parameters, words and tokens, and plain training would need twice them and more."""
    job = job_of(name, "/tmp")
    count = parameters_of(job.dim, job.layers, job.vocabulary, job.length)
    assert count >= RUNS[name][0] * 1e9 and job.vocabulary >= 50_000
    assert job.length * job.sequences >= 128 and job.steps == 3
    assert plain_bytes(job) == 4 * count * (4 if job.optimizer == "adamw" else 2) > 2 * job.device + job.host


def test_a_smaller_try_has_smaller_budgets() -> None:
    small, usual = job_of("6B-4096", "/tmp", billions=0.75), job_of("6B-4096", "/tmp")
    assert small.layers < usual.layers and small.host == usual.host // 8 and small.device == usual.device


def test_a_small_disk_is_refused(tmp_path: Any) -> None:
    job = replace(job_of("6B-4096", str(tmp_path)), layers=10**6)
    with pytest.raises(ValueError, match=r"GB free, and this run takes up to [\d.]+ GB"):
        check_disk(job)


def test_the_table_says_what_does_not_hold() -> None:
    job = job_of("3B-adamw", "/tmp")
    result: dict[str, Any] = {
        "parameters": 3_000_000_000,
        "peak": {"trained": 17 << 30},
        "plan": {"disk read": 30e9, "disk written": 20e9},
        "moved": {"blocks read": 30e9, "blocks written": 20e9, "host read": 5e9},
        "transfers": {"moving": 100.0, "waiting": 25.0},
        "losses": [11.0, 10.0, 9.0],
        "seconds": [3.0, 2.0, 1.0],
        "built": 60.0,
        "whole": 200.0,
    }
    row = markdown([("a", job, result)], machine=23 << 30).splitlines()[-1]
    assert "| 5.00, 0.00 | 30.00 (30.00), 20.00 (20.00) | 75% | 11.000, 10.000, 9.000 |" in row
    assert "resident" in row and "would fit" not in row
    assert "plain training would fit this machine" in markdown([("a", job, result)], machine=1 << 40)
