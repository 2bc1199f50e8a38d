"""The example of the migration page runs as it says, and trains as plain Horovod does."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from examples.from_old_horovod import Ratings, ratings
from tests.support.ranks import free_port, run_by_hand
from tests.test_launch_distributed import ROOT, run

pytestmark = pytest.mark.horovod
SCRIPT = str(ROOT / "examples" / "from_old_horovod.py")
HOROVODRUN = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", "2"]


def plain_horovod(lr: float) -> dict[str, Any]:
    """What the old strategy made of it: Horovod's own optimizer, and a rate times the number of ranks."""
    import horovod.torch as hvd
    from lightning.pytorch import seed_everything

    hvd.init()
    seed_everything(1, verbose=False)
    model = Ratings(lr)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size())
    distributed = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sampler: Any = DistributedSampler(ratings(), hvd.size(), hvd.rank(), shuffle=True, seed=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for users, items, wanted in DataLoader(ratings(), batch_size=16, sampler=sampler):
            distributed.zero_grad()
            torch.nn.functional.mse_loss(model(users, items), wanted).backward()
            distributed.step()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    hvd.barrier()
    hvd.shutdown()
    return state


def by_plain_horovod(lr: float) -> dict[str, Any]:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    from lightning_embrace.comm.horovod_variables import of_place, places

    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts("here:2"), 2))
    told = [of_place(rank, places(["here"] * 2), "127.0.0.1", port, "lo") for rank in range(2)]
    try:
        return dict(run_by_hand(told, plain_horovod, lr)[0])
    finally:
        server.stop()


def test_the_old_rate_gives_the_old_weights(tmp_path: Path) -> None:
    """Under `horovodrun`, with one string changed and the rate multiplied where it can be read."""
    output = run(
        [*HOROVODRUN, sys.executable, SCRIPT, "--like-before", "--lr", "0.05", "--save", str(tmp_path / "ours")]
    )
    assert "2 ranks, learning rate 0.1: loss " in output
    ours = torch.load(tmp_path / "ours", weights_only=True)
    theirs = by_plain_horovod(0.05)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=2e-6)


def test_without_it_nothing_is_multiplied() -> None:
    """The Trainer starts the processes; the rate is the one that was given."""
    output = run([sys.executable, SCRIPT, "--devices", "2", "--lr", "0.05"], MASTER_PORT=str(free_port()))
    assert "2 ranks, learning rate 0.05: loss " in output
    assert "HOROVOD_RANK" not in os.environ
