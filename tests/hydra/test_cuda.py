"""On a CUDA device: the same numbers, within the budget, with copies on a stream of their own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_embrace import HydraStrategy
from lightning_embrace.hydra.lanes import CudaLane, lane_for
from lightning_embrace.hydra.layout import allocate
from lightning_embrace.hydra.ledger import Ledger
from lightning_embrace.hydra.store import Store
from tests.hydra import zoo
from tests.hydra.runs import QUIET, assert_same, fit

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = {"accelerator": "gpu"}
ADAMW = partial(zoo.Stack, lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "stack": (zoo.Stack, "150KiB", {}),
    "adamw": (ADAMW, "300KiB", {}),
    "random": (zoo.Random, "150KiB", {}),
    "clipped": (zoo.Stack, "200KiB", {"gradient_clip_val": 0.5}),
    "accumulated": (ADAMW, "300KiB", {"accumulate_grad_batches": 3}),
    "half": (zoo.Stack, "200KiB", {"precision": "16-mixed"}),
    "bf16": (zoo.Stack, "200KiB", {"precision": "bf16-mixed"}),
}


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("name", CASES)
def test_equals_plain(name: str, tier: str, prefetch: bool, tmp_path: Path) -> None:
    """Twenty steps, bit by bit: nothing is read before it is there, or changed before it was written."""
    make, device, arguments = CASES[name]
    place = {"disk": tmp_path, "host_memory": "4KiB"} if tier == "disk" else {}
    strategy = HydraStrategy(device_memory=device, prefetch=prefetch, **place)
    ours = fit(make, strategy, zoo.batches(), **GPU, **arguments)
    assert_same(ours, fit(make, "auto", zoo.batches(), **GPU, **arguments))
    assert strategy.planned is not None and strategy.planned.plan.shards, "nothing was spilled: nothing was shown"
    assert tier in strategy.planned.plan.places


class Large(LightningModule):
    """Sixteen layers of 16 MiB, with copies and kernels that take long enough to meet."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(16))
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = torch.tanh(block(batch))
        loss = batch.pow(2).mean()
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_the_budget_is_kept() -> None:
    """As torch's own allocator counts; and the numbers are plain training's."""
    data = [torch.randn(512, 2048, generator=torch.Generator().manual_seed(n)) for n in range(6)]
    plain = fit(Large, "auto", data, **GPU)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    peaks = []

    class Watched(Large):
        def on_train_batch_start(self, *_: Any) -> None:
            torch.cuda.reset_peak_memory_stats()

        def on_train_batch_end(self, *_: Any) -> None:
            peaks.append(torch.cuda.max_memory_allocated() - before)

    strategy = HydraStrategy(device_memory="420MiB")
    ours = fit(Watched, strategy, data, **GPU)
    assert_same(ours, plain)
    assert strategy.planned is not None and strategy.planned.plan.slots == 2
    library = 40 << 20  # workspaces of cuBLAS
    assert max(peaks) <= (420 << 20) + library
    assert max(peaks) > 0.5 * (420 << 20), "the budget was not used"


def test_copies_wait_for_computing_and_computing_for_copies() -> None:
    """A slot that is still read is not overwritten, and what a kernel needs is there when it begins."""
    device = torch.device("cuda", 0)
    lane = lane_for(device)
    assert isinstance(lane, CudaLane)
    host = Ledger("host", None)
    extent = Store(device, host, None).reserve(64 << 20, "host")
    extent.memory().fill_(7)
    slot = allocate(64 << 20, device).fill_(1)
    lane.own(slot)
    torch.cuda._sleep(200_000_000)  # computing is late
    first = slot.sum(dtype=torch.int64)
    done = lane.run(lambda: extent.read(slot), lane.mark())
    lane.meet(done)
    second = slot.sum(dtype=torch.int64)
    assert (int(first), int(second)) == (64 << 20, 7 * (64 << 20))
    torch.cuda._sleep(200_000_000)
    slot.fill_(3)
    lane.run(lambda: extent.write(slot), lane.mark())
    lane.finish()
    assert int(extent.memory().sum(dtype=torch.int64)) == 3 * (64 << 20)
    extent.close()
    assert host.total == 0


def test_afterwards(tmp_path: Path) -> None:
    """The model is an ordinary one in host memory when the fit is over."""
    model, data = zoo.Stack(), DataLoader(zoo.batches(3), batch_size=None)
    trainer = Trainer(**{**QUIET, **GPU}, strategy=HydraStrategy(device_memory="150KiB", disk=tmp_path))
    trainer.fit(model, data)
    assert all(p.isfinite().all() for p in model.parameters())
    assert {p.device.type for p in model.parameters()} == {"cpu"}
