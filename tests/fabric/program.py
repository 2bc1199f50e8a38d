"""A script as users of Fabric write it: trains, and rank 0 writes the weights and what it has seen."""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_embrace  # noqa: F401  (registers the strategies)

ROWS, SAMPLES, BATCH, STEPS = 40_000, 24, 3, 4


class Data(Dataset):  # type: ignore[type-arg]
    """Ids and targets."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "ids": torch.randint(ROWS, (5,), generator=generator),
            "target": torch.randn((), generator=generator, dtype=torch.float64),
        }


class Net(nn.Module):
    """A table that is large enough to be sharded by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids)).mean(1)).squeeze(1)


def train(fabric: Any, out: Path, mode: str) -> str:
    """The loop."""
    torch.manual_seed(1)
    module = Net().double()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(Data(), batch_size=BATCH))
    losses = []
    for _, batch in zip(range(STEPS), loader):
        optimizer.zero_grad()
        loss = (model(batch["ids"]) - batch["target"]).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        losses.append(float(fabric.all_reduce(loss.detach())))
        if mode == "raise" and fabric.global_rank == 1:
            raise ValueError("the loop is wrong")
    fabric.save(out / "state.ckpt", {"model": model, "losses": losses})
    if mode == "linger" and fabric.global_rank == 0:
        time.sleep(4.0)  # the other rank has gone long before
    return f"rank {fabric.global_rank} of {fabric.world_size}"


def main() -> None:
    """Trains under a strategy of a namespace."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--fabric", default="lightning.fabric")
    parser.add_argument("--mode", default="plain")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    fabric = importlib.import_module(args.fabric).Fabric(accelerator="cpu", devices=2, strategy=args.strategy)
    if args.strategy in ("embrace", "ddp"):
        fabric.launch()
        print(train(fabric, args.out, args.mode), flush=True)
    else:
        print(fabric.launch(train, args.out, args.mode), flush=True)


if __name__ == "__main__":
    main()
