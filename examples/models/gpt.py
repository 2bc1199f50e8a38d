"""A word-level GPT."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal attention and a feed-forward part, each after a LayerNorm: 12 dim² weights.

    Args:
        dim: Width.
        heads: Of attention; they divide the width.
        dropout: After each part.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed_forward = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attend, self.mix = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.widen, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """From (B, T, dim) to (B, T, dim)."""
        batch, length, dim = x.shape
        parts = self.attend(self.before_attention(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.mix(seen.transpose(1, 2).reshape(batch, length, dim)))
        return x + self.dropout(self.narrow(F.gelu(self.widen(self.before_feed_forward(x)))))


class GPT(LightningModule):
    """Embeddings of words and places, blocks, and a head that is the words' embedding.

    Batches are dictionaries with ``inputs`` and ``targets`` (B, T). The model is built in ``configure_model``, so that
    a strategy may have it built where it fits.

    Args:
        vocab_size: Number of words.
        length: Most tokens of a sequence.
        dim: Width.
        layers: Number of blocks.
        heads: Of attention.
        dropout: In blocks, and after the embeddings.
        lr: Learning rate of AdamW.
    """

    def __init__(
        self,
        vocab_size: int,
        length: int,
        dim: int = 256,
        layers: int = 8,
        heads: int = 4,
        dropout: float = 0.1,
        lr: float = 1e-3,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"`heads` must divide `dim`, got heads={heads} and dim={dim}.")
        self.save_hyperparameters()
        self.lr = lr
        self.blocks: Any = None

    def configure_model(self) -> None:
        """Build the layers, once."""
        if self.blocks is not None:
            return
        sizes: Any = self.hparams
        self.words, self.places = nn.Embedding(sizes.vocab_size, sizes.dim), nn.Embedding(sizes.length, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes.dim, sizes.heads, sizes.dropout) for _ in range(sizes.layers))
        self.dropout, self.last = nn.Dropout(sizes.dropout), nn.LayerNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, sizes.vocab_size, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores of all words, (B, T, V)."""
        x = self.dropout(self.words(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device)))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.last(x))
        return scores

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss, logged."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """The loss on held-out text, logged."""
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        """AdamW with torch's other settings."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())
