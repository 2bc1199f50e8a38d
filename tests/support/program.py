"""The program that launcher tests start: an ordinary training script with exact numbers.

It leaves one file per rank with what that rank saw, and the trained weights as the starting process holds them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script

import lightning.pytorch
import pytorch_lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_embrace import EmbRaceStrategy

ROWS, BATCH, EPOCHS = 24, 2, 2
VOCABULARY = 17_000  # in fp64 and 8 columns more than 1 MiB: large enough for tables="auto"


class Rows(Dataset):  # type: ignore[type-arg]
    """Ids with repetitions, and a target."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.tensor([index % 7, index * index % 31, 500 * index])
        return {"ids": ids, "target": torch.tensor(index % 5 - 2.0, dtype=torch.float64)}


class NetMixin:
    """A large table, a small bag and a dense layer, in fp64."""

    trainer: Any
    log: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.bags = nn.EmbeddingBag(31, 4, mode="sum")
        self.head = nn.Linear(12, 1)
        self.double()
        self.losses: list[float] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        x = torch.cat([torch.tanh(self.words(ids)).mean(dim=1), self.bags(ids % 31)], dim=1)
        return (self.head(x).squeeze(1) - batch["target"]).pow(2).mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_size=BATCH, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_size=BATCH)

    def on_train_end(self) -> None:
        def replicas(loader: Any) -> list[int]:
            return [loader.sampler.num_replicas, loader.sampler.rank]

        trainer = self.trainer
        seen = {
            "train": replicas(trainer.train_dataloader),
            "val": replicas(trainer.val_dataloaders),
            "world": [trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank],
            "losses": self.losses,
        }
        Path(os.environ["PROGRAM_OUT"], f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))


class Net(NetMixin, lightning.pytorch.LightningModule):
    """The module of ``lightning.pytorch``."""


class OldNet(NetMixin, pytorch_lightning.LightningModule):
    """The module of ``pytorch_lightning``."""


def fit(out: Path, strategy: Any, devices: int, num_nodes: int = 1, namespace: str = "lightning.pytorch") -> Any:
    """Trains and writes the results into a folder.

    Returns:
        The trainer.
    """
    pl, net = {"lightning.pytorch": (lightning.pytorch, Net), "pytorch_lightning": (pytorch_lightning, OldNet)}[
        namespace
    ]
    out.mkdir(parents=True, exist_ok=True)
    os.environ["PROGRAM_OUT"] = str(out)
    model = net()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=num_nodes,
        strategy=strategy,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    if trainer.is_global_zero:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save({"state": model.state_dict(), "metrics": metrics}, out / "parent.pt")
    return trainer


def train(*args: Any, **kwargs: Any) -> None:
    """:func:`fit` without its result, which cannot travel between processes."""
    fit(*args, **kwargs)


def reference(replicas: int) -> tuple[dict[str, Tensor], list[float]]:
    """The same training in one process and by hand: weights and losses."""
    model = Net()
    optimizer = model.configure_optimizers()
    losses = []
    for epoch in range(EPOCHS):
        orders = []
        for rank in range(replicas):
            sampler = DistributedSampler(Rows(), replicas, rank, shuffle=True, seed=0)
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        for start in range(0, len(orders[0]), BATCH):
            items = [Rows()[i] for order in orders for i in order[start : start + BATCH]]
            batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
            optimizer.zero_grad()
            loss = model.loss(batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return model.state_dict(), losses


def use_openmp() -> None:
    """Runs a parallel region with two threads, as any program does that has made its data with torch."""
    torch.set_num_threads(2)
    torch.rand(1 << 20).sum()


def main() -> None:
    """Trains under each of ``--strategies`` (``name:devices:namespace``) and prints what it came to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategies", nargs="+", required=True)
    args = parser.parse_args()
    use_openmp()
    for entry in args.strategies:
        given = entry.split(":")
        name, devices, namespace = [*given, *["2", "lightning.pytorch"][len(given) - 1 :]]
        strategy: Any = name
        if name == "forkserver":  # it has no name of its own, as in ddp
            multiprocessing.set_forkserver_preload(["lightning_embrace"])  # one import instead of two
            strategy = EmbRaceStrategy(
                tables=["*"], start_method="forkserver", process_group_backend="gloo", timeout=timedelta(minutes=2)
            )
        if name.startswith("horovod_"):
            strategy = EmbRaceStrategy(communication="horovod", start_method=name.removeprefix("horovod_"))  # type: ignore[arg-type]
        trainer = fit(args.out / entry, strategy, int(devices), namespace=namespace)
        if trainer.is_global_zero:
            print(f"{entry}: loss {float(trainer.callback_metrics['loss'])!r}", flush=True)


if __name__ == "__main__":
    main()
