"""BERT: an encoder that guesses masked words."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from examples.models.common import (
    LEARNING_RATES,
    Blocks,
    OptimizerName,
    choose_optimizer,
    make_optimizer,
    sampled_cross_entropy,
)


class Positions(nn.Module):
    """Adds a learned vector for each position, and normalises.

    Every position is used at every step, so this is a plain parameter and no look-up table.

    Args:
        length: Largest number of positions.
        width: Columns.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width))
        nn.init.normal_(self.weight, std=0.02)
        self.norm = nn.LayerNorm(width)

    def forward(self, rows_BTD: Tensor) -> Tensor:
        """The rows in their places."""
        if rows_BTD.size(1) > len(self.weight):
            raise ValueError(f"A sequence has {rows_BTD.size(1)} words, and the model max_length={len(self.weight)}.")
        placed: Tensor = self.norm(rows_BTD + self.weight[: rows_BTD.size(1)])
        return placed


class Bert(LightningModule):
    """Encoder layers of PyTorch over words and positions; the masked places are scored among the words.

    BERT scores words with its input table. How that tying is treated decides what can be exchanged row by row:

    - ``decoder="lookup"`` (default): the rows of the candidates, targets and negatives, are looked up in the input
      table like any other rows (sampled softmax). All words share one table, and its gradient stays row-sparse.
    - ``decoder="tied"``: a full softmax whose ``nn.Linear`` owns the table's Parameter too. Its gradient is dense, so
      the table can only be replicated.

    What is an embedding: the table of words. There is no table of segments, and positions are a plain parameter. At the
    size of BERT-base (30,522 words, width 768, 12 layers) that is 21.4 % of 109.5 M parameters, either way of decoding.

    Batches are dictionaries with ``inputs`` (B, T), ``positions`` (M,), which count through the flattened batch, and
    ``targets`` (M,), the words that were there; ``decoder="lookup"`` also reads ``target_log_q`` (M,),
    ``negatives`` (K,) and ``negative_log_q`` (K,).

    Args:
        vocab_size: Rows of the table, special words included.
        dim: Width of everything; the feed-forward layers have four times as much.
        layers: Encoder layers.
        heads: Heads of the attention; by default one for every 64 columns.
        max_length: Largest number of positions.
        dropout: Dropout in the layers and after the table.
        decoder: How words are scored, see above.
        sparse: Whether the table has sparse gradients.
        optimizer: ``"adam"``, ``"adagrad"`` or ``"sgd"``; by default Adam, or Adagrad with ``sparse``.
        lr: Learning rate; by default one that suits the optimizer.
    """

    #: which entries of a batch each table looks up while it trains with ``decoder="lookup"``
    lookups: ClassVar[dict[str, tuple[str, ...]]] = {"embedding": ("inputs", "targets", "negatives")}

    def __init__(
        self,
        vocab_size: int,
        dim: int = 256,
        layers: int = 6,
        heads: int | None = None,
        max_length: int = 512,
        dropout: float = 0.0,
        decoder: Literal["lookup", "tied"] = "lookup",
        sparse: bool = False,
        optimizer: OptimizerName | None = None,
        lr: float | None = None,
    ) -> None:
        super().__init__()
        if decoder not in ("lookup", "tied"):
            raise ValueError(f"`decoder` must be 'lookup' or 'tied', got {decoder!r}.")
        if decoder == "tied" and sparse:
            raise ValueError(
                "A full softmax gives its table a dense gradient. HINT: `decoder='lookup'`, or `sparse=False`."
            )
        self.optimizer = choose_optimizer(optimizer, sparse)
        self.save_hyperparameters()
        self.lr = lr if lr is not None else LEARNING_RATES[self.optimizer]
        heads = heads or max(1, dim // 64)

        self.embedding = nn.Embedding(vocab_size, dim, sparse=sparse)
        # The same rows score the words: torch's standard normal would start the logits sqrt(dim) wide.
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.positions = Positions(max_length, dim)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout, activation="gelu", batch_first=True)
            for _ in range(layers)
        )
        self.transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
        self.tied = nn.Linear(dim, vocab_size, bias=False) if decoder == "tied" else None
        if self.tied is not None:
            self.tied.weight = self.embedding.weight

    def blocks(self) -> Blocks:
        """Everything with parameters that is no table."""
        return [
            ("positions", self.positions),
            *((f"encoder.{i}", layer) for i, layer in enumerate(self.encoder)),
            ("transform", self.transform),
        ]

    def forward(self, rows_BTD: Tensor) -> Tensor:
        """States (B, T, dim) of a batch whose rows have been looked up."""
        x = self.dropout(self.positions(rows_BTD))
        for layer in self.encoder:
            x = layer(x)
        states: Tensor = x
        return states

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of the masked places of one batch."""
        inputs, targets = batch["inputs"], batch["targets"]
        if self.tied is not None:
            states = self._at(self(self.embedding(inputs)), batch["positions"])
            loss = F.cross_entropy(self.tied(states), targets)
        else:
            # One look-up for all, so that a sharded table exchanges rows once.
            ids = torch.cat([inputs.flatten(), targets, batch["negatives"]])
            rows, candidates = self.embedding(ids).split([inputs.numel(), len(ids) - inputs.numel()])
            states = self._at(self(rows.view(*inputs.shape, -1)), batch["positions"])
            loss = sampled_cross_entropy(states, candidates, targets, batch["target_log_q"], batch)
        # A sampled loss is not comparable with a full one, hence its name.
        self.log(
            "train_loss" if self.tied is not None else "train_sampled_loss", loss, prog_bar=True, batch_size=len(inputs)
        )
        return loss

    def _at(self, states_BTD: Tensor, positions_M: Tensor) -> Tensor:
        states: Tensor = self.transform(states_BTD.flatten(0, 1)[positions_M])
        return states

    def configure_optimizers(self) -> Optimizer:
        """The one optimizer of the model."""
        return make_optimizer(self.optimizer, self.parameters(), self.lr)
