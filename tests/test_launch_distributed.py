"""Every way in which the ranks' processes come to life trains alike: exact weights, samplers, ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support import program
from tests.support.ranks import free_port, run_by_hand

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "support" / "program.py"


@cache
def expected(replicas: int) -> tuple[dict[str, Tensor], list[float]]:
    return program.reference(replicas)


def check(out: Path, nodes: int, devices: int) -> None:
    """The folder holds what training on nodes × devices must have left."""
    replicas = nodes * devices
    weights, losses = expected(replicas)
    for rank in range(replicas):
        seen = json.loads((out / f"rank{rank}.json").read_text())
        assert seen["train"] == seen["val"] == [replicas, rank]
        assert seen["world"] == [replicas, rank, rank % devices, rank // devices]
        assert seen["losses"] == pytest.approx(losses, rel=0, abs=1e-10)
    parent = torch.load(out / "parent.pt", weights_only=True)
    assert parent["state"].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(parent["state"][name], value, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    assert parent["metrics"]["loss"] == pytest.approx(sum(losses[len(losses) // 2 :]) / (len(losses) / 2))
    assert "val_loss" in parent["metrics"]


def run(command: list[str], **environment: str) -> str:
    """Runs a command as on a user's machine and returns its output."""
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MASTER_PORT", "MASTER_ADDR")}
    done = subprocess.run(
        command, cwd=ROOT, env=clean | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200
    )
    output = done.stdout.decode()
    assert done.returncode == 0, output
    return output


def test_script_started_again_for_each_rank(tmp_path: Path) -> None:
    """The same script under ``ddp`` and ``embrace``, changing the string only, on the processes of the default."""
    output = run([sys.executable, str(PROGRAM), "--out", str(tmp_path), "--strategies", "ddp", "embrace"])
    for name in ("ddp", "embrace"):
        check(tmp_path / name, nodes=1, devices=2)
    printed = dict(re.findall(r"^(\w+): loss (.+)$", output, re.MULTILINE))
    assert float(printed["embrace"]) == pytest.approx(float(printed["ddp"]), rel=0, abs=1e-12)


def test_processes_of_multiprocessing(tmp_path: Path) -> None:
    """Ranks by fork, by spawn and from a fork server.

    A child forked after the parent ran OpenMP with two threads used to hang at its first parallel region (with one
    rank per machine of two cores it would take two threads itself). Under the fork server the ranks would share the
    model's memory and train one model between them. The parent's model must hold the trained, whole weights
    afterwards, and its trainer the metrics.
    """
    names = {
        "embrace_fork:1": 1,
        "embrace_fork": 2,
        "embrace_spawn": 2,
        "forkserver": 2,
        "embrace_spawn:2:pytorch_lightning": 2,
    }
    run([sys.executable, str(PROGRAM), "--out", str(tmp_path), "--strategies", *names], MASTER_PORT=str(free_port()))
    for name, devices in names.items():
        check(tmp_path / name, nodes=1, devices=devices)


def test_the_older_name(tmp_path: Path) -> None:
    """``pytorch_lightning``'s Trainer and module train under the same names."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [{**common, "LOCAL_RANK": str(d)} for d in range(2)]
    run_by_hand(places, program.train, tmp_path, "embrace", 2, 1, "pytorch_lightning")
    check(tmp_path, nodes=1, devices=2)


def test_torchrun(tmp_path: Path) -> None:
    """``torchrun`` starts the processes; Lightning starts none."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    run([*torchrun, str(PROGRAM), "--out", str(tmp_path), "--strategies", "embrace"])
    check(tmp_path / "embrace", nodes=1, devices=2)


def test_slurm_on_two_nodes(tmp_path: Path) -> None:
    """``srun`` starts one task on each of two nodes."""
    common = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "127.0.0.1,127.0.0.2",
        "SLURM_LOCALID": "0",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [{**common, "SLURM_PROCID": str(r), "SLURM_NODEID": str(r)} for r in range(2)]
    run_by_hand(tasks, program.train, tmp_path, "embrace", 1, 2)
    check(tmp_path, nodes=2, devices=1)


@pytest.mark.parametrize("devices", [1, 2])
def test_two_nodes(tmp_path: Path, devices: int) -> None:
    """Ranks and samplers count over nodes; local ranks do not. Without a local rank Lightning is the launcher."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nodes = [{**common, "NODE_RANK": str(n)} for n in range(2)]
    places = nodes if devices == 1 else [{**n, "LOCAL_RANK": str(d)} for n in nodes for d in range(2)]
    run_by_hand(places, program.train, tmp_path, "embrace", devices, 2)
    check(tmp_path, nodes=2, devices=devices)
