"""Every way in which Fabric's processes come to life trains alike, and their ends are quiet, or say what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from tests.fabric import program
from tests.support.ranks import free_port

ROOT = Path(__file__).parents[2]


def run(*arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Runs the script as on a user's machine."""
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MASTER_PORT", "MASTER_ADDR")}
    return subprocess.run(
        [sys.executable, "-m", "tests.fabric.program", *arguments],
        cwd=ROOT,
        env=clean | {"MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@cache
def expected() -> tuple[dict[str, Tensor], list[float]]:
    """One process, by hand."""
    torch.manual_seed(1)
    model = program.Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = program.Data()
    orders = [list(DistributedSampler(data, 2, rank, shuffle=False)) for rank in range(2)]
    losses = []
    for step in range(program.STEPS):
        places = range(step * program.BATCH, (step + 1) * program.BATCH)
        items = [data[order[place]] for order in orders for place in places]
        batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
        optimizer.zero_grad()
        loss = (model(batch["ids"]) - batch["target"]).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return dict(model.state_dict()), losses


SLOW = pytest.mark.matrix


@pytest.mark.parametrize(
    ("strategy", "fabric", "mode"),
    [
        ("embrace", "lightning.fabric", "linger"),
        ("embrace_spawn", "lightning_fabric", "plain"),
        ("embrace", "lightning_fabric", "plain"),
        pytest.param("embrace_spawn", "lightning.fabric", "linger", marks=SLOW),
        pytest.param("embrace_fork", "lightning.fabric", "linger", marks=SLOW),
    ],
)
def test_launchers(tmp_path: Path, strategy: str, fabric: str, mode: str) -> None:
    """By name, in both namespaces; a rank that ends long before another is not missed."""
    done = run("--out", str(tmp_path), "--strategy", strategy, "--fabric", fabric, "--mode", mode)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2" in done.stdout
    assert "Traceback" not in done.stderr and "[lightning_embrace]" not in done.stderr, done.stderr
    assert "EmbRace on 2 ranks" in done.stderr, "the plan was not printed"
    found = torch.load(tmp_path / "state.ckpt", weights_only=True)
    weights, losses = expected()
    assert found["losses"] == pytest.approx(losses, rel=0, abs=1e-10)
    for name, value in weights.items():
        torch.testing.assert_close(found["model"][name], value, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("strategy", ["embrace", pytest.param("embrace_fork", marks=SLOW)])
def test_a_loop_that_raises(tmp_path: Path, strategy: str) -> None:
    """Where nobody of ours is asked: the other rank is told by whom, and ends."""
    done = run("--out", str(tmp_path), "--strategy", strategy, "--mode", "raise")
    assert done.returncode != 0
    assert "the loop is wrong" in done.stderr
    assert "[lightning_embrace] rank 0: rank 1 failed" in done.stderr, done.stderr
