"""The benchmark of what ``hydra`` holds and moves, and a small case of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks.spilled_gpt import SpilledGPT, layers_for, parameters_of
from examples.benchmarks.spilled_job import BESIDE, Job, JobError, result_of
from examples.benchmarks.spilled_memory import faults, job_of, markdown

JOB = Job(device=1000, host=500, disk="/tmp")
RESULT: dict[str, Any] = {
    "peak": {"built": 10, "trained": 1500 + BESIDE},
    "plan": {"disk read": 100, "disk written": 40},
    "moved": {"blocks read": 104.0, "blocks written": 40.0},
    "losses": [2.0, 1.0],
    "seconds": [3.0, 2.0, 1.0, 1.5],
}


def test_parameters_are_counted() -> None:
    """The formula is the model's, and no smaller model has as many as were asked for."""
    model = SpilledGPT(64, 3, 100, 16, "sgd")
    model.configure_model()
    count = sum(p.numel() for p in model.parameters())
    assert parameters_of(64, 3, 100, 16) == count
    assert layers_for(count, 64, 100, 16) == 3 and layers_for(count + 1, 64, 100, 16) == 4


def test_a_result_that_holds() -> None:
    assert faults(JOB, RESULT) == []
    assert "| 104.0 (100.0)" not in markdown([(JOB, RESULT)])  # in MB
    assert markdown([(JOB, RESULT)]).splitlines()[-1].endswith("| 1.00 | none |")


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"peak": {"trained": 1501 + BESIDE}}, "resident"),
        ({"moved": {"blocks read": 106.0, "blocks written": 40.0}}, "were read"),
        ({"moved": {"blocks read": 100.0, "blocks written": 37.0}}, "were written"),
        ({"plan": {}, "moved": {}}, "nothing was shown"),
        ({"losses": [1.0, 1.0]}, "not fallen"),
    ],
)
def test_a_result_that_does_not_hold(changed: dict[str, Any], fault: str) -> None:
    assert [f for f in faults(JOB, {**RESULT, **changed}) if fault in f]


def test_a_job_that_fails_says_why() -> None:
    with pytest.raises(JobError, match="unlikely"):
        result_of(Job(optimizer="unlikely", layers=1, dim=64), timeout=120)


def test_a_small_case(tmp_path: Path) -> None:
    """100 MB of parameters under 38 MB of device and of host memory each, in a process that cannot have much more.

    The kernel counts the bytes that the plan foretells, and the process is never larger than its budgets allow.
    """
    if not _has_blocks(tmp_path):
        pytest.skip("the temporary folder is in memory: the kernel counts no bytes")
    job = job_of(2.8, 36 << 20, dim=384, optimizer="sgd", disk=str(tmp_path))
    result = result_of(job, timeout=200)
    assert faults(job, result) == []
    assert 4 * result["parameters"] > 100e6
    assert result["moved"]["disk read"] == result["plan"]["disk read"], "as the store counts, it is exact"
    assert result["moved"]["disk written"] == result["plan"]["disk written"]
    assert os.listdir(tmp_path) == []


def _has_blocks(folder: Path) -> bool:
    """Whether a folder's files are on a block device."""
    return Path(f"/sys/dev/block/{os.major(folder.stat().st_dev)}:{os.minor(folder.stat().st_dev)}").exists()
