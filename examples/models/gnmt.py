"""Google's neural translation system: LSTM encoder and decoder with attention."""

from __future__ import annotations

from typing import ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from examples.models.common import (
    LEARNING_RATES,
    Blocks,
    OptimizerName,
    Recurrent,
    choose_optimizer,
    make_optimizer,
)


class AdditiveAttention(nn.Module):
    """Attention whose scores are a small network of query and key (Bahdanau).

    Args:
        width: Of queries, keys and the context.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.score = nn.Parameter(torch.empty(width))
        nn.init.uniform_(self.score, -(width**-0.5), width**-0.5)

    def forward(self, queries_BTD: Tensor, keys_BSD: Tensor) -> Tensor:
        """The context (B, T, width) of each query."""
        sums_BTSD = self.query(queries_BTD)[:, :, None] + self.key(keys_BSD)[:, None]
        weights_BTS = (torch.tanh(sums_BTSD) @ self.score).softmax(-1)
        return weights_BTS @ keys_BSD


class GNMT(LightningModule):
    """Half of the LSTM layers encode, half decode; the decoder attends to the encoder from its first layer.

    As published: the first encoder layer runs in both directions, layers from the third on have residual connections,
    and the context goes into every decoder layer but the first. The first decoder layer sees the words only, so that
    each layer runs over a whole sequence at once.

    What is an embedding: the source and the target table. The softmax is a full one, with an ``nn.Linear`` of its own:
    dense, and of the same size as one table. So it is in the published model: 8 layers of width 1024 with 32,320 words
    have 193.8 M parameters, 34.2 % of them in the two tables.

    Batches are dictionaries with ``source`` (B, S), ``target_inputs`` and ``target_outputs`` (B, T).

    Args:
        vocab_size: Words of either language.
        dim: Width of everything.
        layers: LSTM layers, encoder and decoder together: even, at least 4.
        dropout: Dropout before every LSTM layer.
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
        layers: int = 8,
        dropout: float = 0.0,
        sparse: bool = False,
        optimizer: OptimizerName | None = None,
        lr: float | None = None,
    ) -> None:
        super().__init__()
        if layers < 4 or layers % 2:
            raise ValueError(
                f"`layers` counts encoder and decoder layers: it must be even and at least 4, got {layers}."
            )
        self.optimizer = choose_optimizer(optimizer, sparse)
        self.save_hyperparameters()
        self.lr = lr if lr is not None else LEARNING_RATES[self.optimizer]
        half = layers // 2

        self.source_embedding = nn.Embedding(vocab_size, dim, sparse=sparse)
        self.target_embedding = nn.Embedding(vocab_size, dim, sparse=sparse)
        # Each direction of the first layer is as wide as the others, so the second one takes twice the width.
        self.encoder = nn.ModuleList([Recurrent(dim, dim, bidirectional=True), Recurrent(2 * dim, dim)])
        self.encoder.extend(Recurrent(dim, dim) for _ in range(half - 2))
        self.decoder = nn.ModuleList([Recurrent(dim, dim)])
        self.attention = AdditiveAttention(dim)
        self.decoder.extend(Recurrent(2 * dim, dim) for _ in range(half - 1))
        self.output = nn.Linear(dim, vocab_size)
        self.dropout = nn.Dropout(dropout)

    def blocks(self) -> Blocks:
        """Everything with parameters that is no table."""
        return [
            *((f"encoder.{i}", layer) for i, layer in enumerate(self.encoder)),
            ("decoder.0", self.decoder[0]),
            ("attention", self.attention),
            *((f"decoder.{i}", layer) for i, layer in enumerate(self.decoder) if i > 0),
            ("output", self.output),
        ]

    def forward(self, source: Tensor, target_inputs: Tensor) -> Tensor:
        """Scores (B, T, words) of the word after each of ``target_inputs``."""
        # Both look-ups first: nothing that is computed decides them.
        x, y = self.source_embedding(source), self.target_embedding(target_inputs)
        for i, layer in enumerate(self.encoder):
            states = layer(self.dropout(x))
            x = x + states if i > 1 else states
        y = self.decoder[0](self.dropout(y))
        context = self.attention(y, x)
        for i, layer in enumerate(self.decoder):
            if i > 0:
                states = layer(self.dropout(torch.cat([y, context], dim=-1)))
                y = y + states if i > 1 else states
        scores: Tensor = self.output(self.dropout(y))
        return scores

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch."""
        scores = self(batch["source"], batch["target_inputs"])
        loss = F.cross_entropy(scores.flatten(0, 1), batch["target_outputs"].flatten())
        self.log("train_loss", loss, prog_bar=True, batch_size=batch["source"].size(0))
        return loss

    def configure_optimizers(self) -> Optimizer:
        """The one optimizer of the model."""
        return make_optimizer(self.optimizer, self.parameters(), self.lr)
