"""A GPT-like model for the benchmarks of ``hydra``: its size is free, and its data are one batch, repeated."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from examples.models.gpt import Block

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.03),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


class SpilledGPT(LightningModule):
    """Built in ``configure_model``, so that a strategy may have it built where it fits.

    Args:
        dim: d.
        layers: Blocks.
        vocabulary: V, of an embedding and a head of their own.
        length: Tokens of a sequence.
        optimizer: ``"sgd"`` or ``"adamw"``.
    """

    def __init__(self, dim: int, layers: int, vocabulary: int, length: int, optimizer: str) -> None:
        super().__init__()
        self.sizes = (dim, layers, vocabulary, length)
        self.optimizer = optimizer
        self.blocks: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.blocks is not None:
            return
        dim, layers, vocabulary, length = self.sizes
        self.words, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, max(1, dim // 64)) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        ids, targets = batch[:, :-1], batch[:, 1:]
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(self.last(x)).flatten(0, 1), targets.flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


def parameters_of(dim: int, layers: int, vocabulary: int, length: int) -> int:
    """How many numbers the model has."""
    return layers * (12 * dim**2 + 13 * dim) + 2 * vocabulary * dim + length * dim + 2 * dim


def layers_for(parameters: float, dim: int, vocabulary: int, length: int) -> int:
    """Blocks of the smallest model with so many parameters or more."""
    without, one = (parameters_of(dim, layers, vocabulary, length) for layers in (0, 1))
    return max(1, -int(-(parameters - without) // (one - without)))


def batches(count: int, sequences: int, length: int, vocabulary: int) -> list[Tensor]:
    """One batch, repeated."""
    ids = torch.randint(vocabulary, (sequences, length + 1), generator=torch.Generator().manual_seed(0))
    return [ids] * count
