"""The Transformer: encoder and decoder of self-attention."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from examples.models.common import LEARNING_RATES, Blocks, OptimizerName, choose_optimizer, make_optimizer


def sinusoids(length: int, width: int, like: Tensor) -> Tensor:
    """Fixed positions (length, width): sines of the even columns' frequencies, then cosines.

    They are computed at every step: a buffer would be broadcast by whoever synchronises buffers.
    """
    half = (width + 1) // 2
    frequencies = torch.exp(-math.log(10_000.0) / half * torch.arange(half, device=like.device, dtype=like.dtype))
    angles = torch.arange(length, device=like.device, dtype=like.dtype)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]


class CausalDecoderLayer(nn.TransformerDecoderLayer):
    """A decoder layer in which no position sees a later one."""

    def forward(self, inputs_BTD: Tensor, memory_BSD: Tensor) -> Tensor:  # type: ignore[override]
        """States of all positions."""
        mask = nn.Transformer.generate_square_subsequent_mask(
            inputs_BTD.size(1), device=inputs_BTD.device, dtype=inputs_BTD.dtype
        )
        return super().forward(inputs_BTD, memory_BSD, tgt_mask=mask, tgt_is_causal=True)


class Transformer(LightningModule):
    """The published model, with layers of PyTorch.

    What is an embedding: the source and the target table; positions are fixed sines. The softmax is a full one, with
    an ``nn.Linear`` of its own: dense, and of the same size as one table. So counted, the "big" Transformer (width
    1024, 6 and 6 layers) with 33,708 words has 279.9 M parameters, 24.7 % of them in the two tables.

    Batches are dictionaries with ``source`` (B, S), ``target_inputs`` and ``target_outputs`` (B, T).

    Args:
        vocab_size: Words of either language.
        dim: Width of everything; the feed-forward layers have four times as much.
        layers: Layers of the encoder, and as many of the decoder.
        heads: Heads of the attention; by default one for every 64 columns.
        dropout: Dropout in the layers and after the tables.
        sparse: Whether the tables have sparse gradients.
        optimizer: ``"adam"``, ``"adagrad"`` or ``"sgd"``; by default Adam, or Adagrad with ``sparse``.
        lr: Learning rate; by default one that suits the optimizer.
    """

    #: which entries of a batch each table looks up
    lookups: ClassVar[dict[str, tuple[str, ...]]] = {
        "source_embedding": ("source",),
        "target_embedding": ("target_inputs",),
    }

    def __init__(
        self,
        vocab_size: int,
        dim: int = 256,
        layers: int = 6,
        heads: int | None = None,
        dropout: float = 0.0,
        sparse: bool = False,
        optimizer: OptimizerName | None = None,
        lr: float | None = None,
    ) -> None:
        super().__init__()
        self.optimizer = choose_optimizer(optimizer, sparse)
        self.save_hyperparameters()
        self.lr = lr if lr is not None else LEARNING_RATES[self.optimizer]
        heads = heads or max(1, dim // 64)

        self.source_embedding = nn.Embedding(vocab_size, dim, sparse=sparse)
        self.target_embedding = nn.Embedding(vocab_size, dim, sparse=sparse)
        for table in (self.source_embedding, self.target_embedding):
            nn.init.normal_(table.weight, std=dim**-0.5)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout, batch_first=True) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            CausalDecoderLayer(dim, heads, 4 * dim, dropout, batch_first=True) for _ in range(layers)
        )
        self.output = nn.Linear(dim, vocab_size)
        self.dropout = nn.Dropout(dropout)

    def blocks(self) -> Blocks:
        """Everything with parameters that is no table."""
        return [
            *((f"encoder.{i}", layer) for i, layer in enumerate(self.encoder)),
            *((f"decoder.{i}", layer) for i, layer in enumerate(self.decoder)),
            ("output", self.output),
        ]

    def forward(self, source: Tensor, target_inputs: Tensor) -> Tensor:
        """Scores (B, T, words) of the word after each of ``target_inputs``."""
        # Both look-ups first: nothing that is computed decides them.
        x, y = self.source_embedding(source), self.target_embedding(target_inputs)
        x, y = self._placed(x), self._placed(y)
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y, x)
        scores: Tensor = self.output(y)
        return scores

    def _placed(self, rows_BTD: Tensor) -> Tensor:
        _, length, width = rows_BTD.shape
        placed: Tensor = self.dropout(rows_BTD * math.sqrt(width) + sinusoids(length, width, rows_BTD))
        return placed

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch."""
        scores = self(batch["source"], batch["target_inputs"])
        loss = F.cross_entropy(scores.flatten(0, 1), batch["target_outputs"].flatten())
        self.log("train_loss", loss, prog_bar=True, batch_size=batch["source"].size(0))
        return loss

    def configure_optimizers(self) -> Optimizer:
        """The one optimizer of the model."""
        return make_optimizer(self.optimizer, self.parameters(), self.lr)
