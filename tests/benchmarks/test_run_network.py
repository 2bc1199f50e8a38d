"""The harness on a real emulated cluster. Needs root and network namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks.test_launch import running, wait_until

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "examples/benchmarks/run.py", "--models", "lm", "--ranks", "2", "--repetitions", "1"]
SMALL = ["--steps", "2", "--warmup", "1", "--vocabulary", "5000", "--dim", "32", "--batch", "2", "--length", "8"]

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]


def namespaces() -> set[str]:
    """Names of all network namespaces of the machine."""
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.split()}


def started_by(pid: int) -> list[int]:
    """Process ids of its children, their children, and so on."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(child): int(parent) for child, parent in map(str.split, listed.splitlines())}
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def test_a_few_steps_beside_ddp(tmp_path):
    """Two peers train the same model on two namespaces: same losses, bytes counted on the links, nothing left.

    A third run, of ``embrace`` alone, is traced.
    """
    before = namespaces()
    command = [*RUN, *SMALL, "--peers", "embrace,ddp", "--rate", "1gbit", "--traced-steps", "2", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=240)
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [r["job"]["peer"] for r in records] == ["embrace", "ddp", "embrace"]
    assert [bool(r["job"]["trace"]) for r in records] == [False, False, True]
    assert Path(records[2]["job"]["trace"]).stat().st_size > 1000
    for record in records:
        for result in record["results"]:
            assert len(result["steps"]) == 2
            assert all(step["sent"] > 0 for step in result["steps"])
    report = (tmp_path / "report.md").read_text()
    assert "**no**" not in report
    assert "did not run" not in report
    assert (tmp_path / "steps-lm-sgd.png").stat().st_size > 1000
    assert namespaces() <= before


def test_an_interrupted_run_leaves_nothing(tmp_path):
    """Ctrl-C in the middle of a job removes the cluster and ends the ranks and the process that they were forked from.

    The run first tries what the machine can do on a cluster of one rank, which comes and goes: one look at the list
    found that one, the next found nothing. So the test waits for the switch and both ranks, with their processes.
    """
    before = namespaces()
    command = [*RUN, *SMALL, "--peers", "ddp", "--steps", "5000", "--out", str(tmp_path)]
    run = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while len(made := namespaces() - before) < 3 or len(started := started_by(run.pid)) < 3:
        assert time.monotonic() < deadline, (made, started_by(run.pid))
        time.sleep(0.1)
    assert (len(made), len(started)) == (3, 3)
    os.killpg(run.pid, signal.SIGINT)
    run.wait(timeout=60)
    assert run.returncode != 0
    assert namespaces() <= before
    wait_until(lambda: not any(running(pid) for pid in started))
