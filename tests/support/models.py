"""Small models for exactness tests. No random numbers and no batch statistics in their steps."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_embrace import optim

VOCABULARY = 23
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "sparseadam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
    "our adam": lambda p: optim.Adam(p, lr=0.01),
    "our adamw": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "our momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "our adagrad": lambda p: optim.Adagrad(p, lr=0.05),
}


class Small(LightningModule):
    """Base: a loss that is a mean over equal counts, recorded by step."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.losses: list[float] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


class OneTable(Small):
    """One embedding, looked up once; with ``head=False`` the table is the only parameter."""

    def __init__(self, columns: int, sparse: bool, optimizer: str, head: bool = True) -> None:
        super().__init__(optimizer)
        self.table = nn.Embedding(VOCABULARY, columns, sparse=sparse)
        self.head = nn.Linear(columns, 3) if head else None

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.table(batch["ids"])
        x = torch.tanh(x).mean(dim=1)
        if self.head is not None:
            x = self.head(x)
        return (x.mean(dim=1) - batch["target"]).pow(2).mean()


class Bag(Small):
    """An embedding bag."""

    def __init__(
        self, columns: int, sparse: bool, optimizer: str, head: bool = True, mode: str = "mean", rows: int = VOCABULARY
    ) -> None:
        super().__init__(optimizer)
        self.table = nn.EmbeddingBag(rows, columns, sparse=sparse, mode=mode)
        self.head = nn.Linear(columns, 3) if head else None

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = torch.tanh(self.table(batch["ids"]))
        if self.head is not None:
            x = self.head(x)
        return (x.mean(dim=1) - batch["target"]).pow(2).mean()


class TwoTables(Small):
    """Two tables with padding, the first looked up twice: three look-ups."""

    def __init__(self, columns: int, sparse: bool, optimizer: str, head: bool = True) -> None:
        super().__init__(optimizer)
        self.words = nn.Embedding(VOCABULARY, columns, sparse=sparse, padding_idx=0)
        self.tags = nn.Embedding(VOCABULARY, columns, sparse=sparse, padding_idx=1)
        self.head = nn.Linear(columns, 3) if head else None

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        x = self.words(ids) * self.tags(ids.flip(1)) + self.words((ids + 3) % VOCABULARY)
        x = torch.tanh(x).mean(dim=1)
        if self.head is not None:
            x = self.head(x)
        return (x.mean(dim=1) - batch["target"]).pow(2).mean()


class ManualSparseAdam(Small):
    """Mixed in before a model with ``sparse=True``: SparseAdam for its tables, SGD for the rest, stepped by hand."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers()
        for o in optimizers:
            o.zero_grad()
        loss = self.loss(batch)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")))
        self.manual_backward(loss)
        for o in optimizers:
            o.step()

    def configure_optimizers(self) -> Any:
        tables = [m.weight for m in self.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        return [torch.optim.SparseAdam(tables, lr=0.01), torch.optim.SGD(self.head.parameters(), lr=0.1)]


class ManualOneTable(ManualSparseAdam, OneTable):
    """One embedding in manual optimization."""


class ManualBag(ManualSparseAdam, Bag):
    """A bag in manual optimization."""


class ManualTwoTables(ManualSparseAdam, TwoTables):
    """Two tables, three look-ups, in manual optimization."""


def batches(
    steps: int, world_size: int, size: int = 4, length: int = 5, seed: int = 0
) -> list[list[dict[str, Tensor]]]:
    """Per step, per rank, a batch; Zipf-like ids so that ranks share rows and steps repeat them."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    made = []
    for _ in range(steps):
        step = []
        for _ in range(world_size):
            ids = torch.multinomial(weights, size * length, replacement=True, generator=generator)
            target = torch.randn(size, generator=generator, dtype=torch.float64)
            step.append({"ids": ids.view(size, length), "target": target})
        made.append(step)
    return made


def concatenated(step: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The batch that one process sees."""
    return {key: torch.cat([b[key] for b in step]) for key in step[0]}
