"""torchrun starts all ranks anew when one dies: the script goes on from its last whole checkpoint."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.faults import goes_on
from tests.faults.victim import Harm
from tests.faults.world import World
from tests.support.lifecycle import assert_same

N = 2
SECONDS = 900


@pytest.mark.matrix
@pytest.mark.timeout(2 * SECONDS)
def test_elastic_restart(tmp_path: Path) -> None:
    """kill -9 of one worker of ``torchrun --max-restarts``: it ends with the numbers of a run that nobody disturbed."""
    outputs, undisturbed, killed = (tmp_path / name for name in ("outputs", "undisturbed", "killed"))
    for path in (outputs, undisturbed, killed):
        path.mkdir()
    world = World(outputs, N, functools.partial(goes_on.run, undisturbed, Harm("train", "none", -1), N))
    root = Path(__file__).parents[2]
    clean = {k: v for k, v in os.environ.items() if k not in ("MASTER_PORT", "MASTER_ADDR", "LOCAL_RANK", "WORLD_SIZE")}
    script = ["--max-restarts", "2", goes_on.__file__, str(killed), "--rank", "1", "--count", "5"]
    agent = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(N), *script],
        env=clean | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = agent.communicate(timeout=SECONDS)
    finally:
        agent.terminate()  # it ends its workers, which are no children of ours
        agent.wait(60)
    assert agent.returncode == 0, said
    assert "rank 1 died (its process ended without a word)" in said
    for end in world.ends():
        assert end.code == 0, end.output
    # the first run came to the sixth step, and had saved after the fourth
    assert f"Restoring states from the checkpoint path at {killed}/" in said, said
    ends = [torch.load(folder / "end.pt", weights_only=True) for folder in (killed, undisturbed)]
    assert_same(*ends, tolerance=0.0)
