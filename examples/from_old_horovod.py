"""A module written for Lightning's old ``strategy="horovod"``, under ``embrace_horovod``: one string has changed.

Start it as it was started then, or let the Trainer start the processes:

    horovodrun --gloo -np 2 python examples/from_old_horovod.py
    python examples/from_old_horovod.py --devices 2

The old strategy multiplied the learning rate by the number of ranks and did not say so. ``--like-before`` does it in
``configure_optimizers``, where it can be read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_embrace  # noqa: F401  registers the strategies

USERS, ITEMS, SAMPLES = 20_000, 500, 512


class Ratings(LightningModule):
    """Rates items for users, by the product of their vectors."""

    def __init__(self, lr: float, like_before: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.users = nn.Embedding(USERS, 16)
        self.items = nn.Embedding(ITEMS, 16)
        self.bias = nn.Linear(16, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        both = self.users(users) * self.items(items)
        return both.sum(1) + self.bias(both).squeeze(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        users, items, ratings = batch
        loss = nn.functional.mse_loss(self(users, items), ratings)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        lr = self.hparams["lr"]
        if self.hparams["like_before"]:
            lr *= self.trainer.world_size  # what the old strategy did behind the scenes
        return torch.optim.SGD(self.parameters(), lr=lr)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(ratings(), batch_size=16, shuffle=True)


def ratings() -> TensorDataset:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    users = torch.randint(USERS, (SAMPLES,), generator=generator)
    items = torch.randint(ITEMS, (SAMPLES,), generator=generator)
    return TensorDataset(users, items, (users % 3 + items % 2).float())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="auto", help="not under horovodrun")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--like-before", action="store_true", help="the old strategy's learning rate")
    parser.add_argument("--save", type=Path, help="where the trained weights go")
    arguments = parser.parse_args()
    seed_everything(1, verbose=False)
    model = Ratings(arguments.lr, arguments.like_before)
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy="embrace_horovod",  # was: "horovod"
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model)
    if trainer.is_global_zero:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        print(f"{trainer.world_size} ranks, learning rate {rate:g}: loss {float(trainer.callback_metrics['loss']):.4f}")
        if arguments.save is not None:
            torch.save(model.state_dict(), arguments.save)


if __name__ == "__main__":
    main()
