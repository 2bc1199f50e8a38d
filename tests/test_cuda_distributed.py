"""The same numbers on a GPU: one rank over NCCL, and two ranks over gloo that share the first GPU.

NCCL refuses two ranks on one GPU; with more of them, ``test_nccl_on_all_gpus`` runs one rank on each.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace import EmbRaceStrategy
from tests.support.models import Bag, OneTable, Small, TwoTables, batches, concatenated
from tests.support.ranks import free_port, run_by_hand
from tests.support.training import Outcome, assert_equal, outcome, train

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 8


class Normalised(Small):
    """Batch statistics over all ranks."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.table = nn.Embedding(23, 6)
        self.norm = nn.BatchNorm1d(6)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.norm(self.table(batch["ids"]).mean(dim=1)).pow(2).sum(dim=1) - batch["target"]).pow(2).mean()


MODELS: dict[str, Callable[[], Any]] = {
    "adam": functools.partial(OneTable, 10, False, "adam"),
    "two sparse tables": functools.partial(TwoTables, 5, True, "adagrad"),
    "bag": functools.partial(Bag, 4, False, "momentum"),
}


def on_gpu(make: Callable[[], Any], devices: list[int], backend: str | None, **arguments: Any) -> Outcome:
    """Runs in a process: trains this rank's batches on its GPU."""
    rank = int(os.environ["LOCAL_RANK"])
    data = [step[rank] for step in batches(STEPS, len(devices))]
    strategy = EmbRaceStrategy(
        tables=["*"],
        process_group_backend=backend,
        parallel_devices=[torch.device("cuda", d) for d in devices],
    )
    model, trainer = train(make, data, strategy, 1, accelerator="cuda", **arguments)
    left = outcome(model, trainer)
    assert all(not value.is_cuda for value in left.state.values())  # teardown brings everything back
    return left


def on_cpu(make: Callable[[], Any], world_size: int) -> Outcome:
    data = [concatenated(step) for step in batches(STEPS, world_size)]
    return copy.deepcopy(outcome(*train(make, data, "auto")))


def ranks_of(count: int) -> list[dict[str, str]]:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    return [{**common, "LOCAL_RANK": str(rank)} for rank in range(count)]


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_over_nccl(model: str) -> None:
    (ours,) = run_by_hand(ranks_of(1), on_gpu, MODELS[model], [0], "nccl")
    assert_equal(ours, on_cpu(MODELS[model], 1), 1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_over_gloo_on_one_gpu(model: str) -> None:
    """Exchanges of CUDA tensors, hooks in autograd's thread of the device, rows served from the GPU."""
    plain = on_cpu(MODELS[model], 2)
    for ours in run_by_hand(ranks_of(2), on_gpu, MODELS[model], [0, 0], "gloo"):
        assert_equal(ours, plain, 1e-9)


def test_sync_batchnorm() -> None:
    """As under DDP: statistics of the batches of all ranks, and ordinary layers afterwards."""
    plain = on_cpu(Normalised, 2)
    fit = functools.partial(on_gpu, sync_batchnorm=True)
    for ours in run_by_hand(ranks_of(2), fit, Normalised, [0, 0], "gloo"):
        assert_equal(ours, plain, 1e-9)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes one rank per GPU: needs two")
def test_nccl_on_all_gpus() -> None:
    count = torch.cuda.device_count()
    plain = on_cpu(MODELS["adam"], count)
    for ours in run_by_hand(ranks_of(count), on_gpu, MODELS["adam"], list(range(count)), None):
        assert_equal(ours, plain, 1e-9)
