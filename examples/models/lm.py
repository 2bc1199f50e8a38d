"""A word-level LSTM language model with a full or a sampled softmax."""

from typing import ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torchmetrics import MeanMetric
from torchmetrics.text import Perplexity

from examples.models.common import (
    LEARNING_RATES,
    Blocks,
    OptimizerName,
    Recurrent,
    choose_optimizer,
    make_optimizer,
    sampled_cross_entropy,
)

# Rows of the output table that validation looks up at once: bounds the buffers of one look-up.
_CHUNK = 8192

_LEARNING_RATES = {**LEARNING_RATES, "sgd": 1.0}


class LanguageModel(LightningModule):
    """Embedding, LSTM, projection to the width of the tables, softmax over the words.

    Batches are dictionaries with ``inputs`` and ``targets`` (B, T). With ``softmax="sampled"`` they also hold
    ``negatives`` (K,) with ``negative_log_q`` (K,) and ``target_log_q`` (B, T), the log-probabilities with which each
    candidate is drawn. Then both tables are ``nn.Embedding`` and a step touches few rows of either.

    A step reads the tables through their modules only, never through ``weight``: whoever trains the model may keep a
    table in parts.

    Args:
        vocab_size: Rows of the tables, at least the number of words of the data.
        dim: Columns of the tables.
        hidden: Width of the LSTM. Wider than ``dim``, it projects its recurrent state down to ``dim`` (LSTMP);
            narrower, a linear layer brings its output up to ``dim``.
        layers: Number of LSTM layers.
        dropout: Dropout after the input table, between LSTM layers and before the softmax.
        softmax: ``"full"`` scores every word with an ``nn.Linear``; ``"sampled"`` the targets and the negatives.
        sparse: Whether the tables have sparse gradients.
        optimizer: ``"adam"``, ``"adagrad"`` or ``"sgd"``; by default Adam, or Adagrad with ``sparse``.
        lr: Learning rate; by default one that suits the optimizer.
    """

    #: which entries of a batch each table looks up while it trains with ``softmax="sampled"``
    lookups: ClassVar[dict[str, tuple[str, ...]]] = {"embedding": ("inputs",), "output": ("targets", "negatives")}

    def __init__(
        self,
        vocab_size: int,
        dim: int = 256,
        hidden: int = 128,
        layers: int = 1,
        dropout: float = 0.0,
        softmax: Literal["full", "sampled"] = "sampled",
        sparse: bool = False,
        optimizer: OptimizerName | None = None,
        lr: float | None = None,
    ) -> None:
        super().__init__()
        if softmax not in ("full", "sampled"):
            raise ValueError(f"`softmax` must be 'full' or 'sampled', got {softmax!r}.")
        self.optimizer = choose_optimizer(optimizer, sparse)
        self.save_hyperparameters()
        self.vocab_size = vocab_size
        self.softmax = softmax
        self.lr = lr if lr is not None else _LEARNING_RATES[self.optimizer]

        self.embedding = nn.Embedding(vocab_size, dim, sparse=sparse)
        self.lstm = Recurrent(dim, hidden, layers, dropout=dropout, proj_size=dim if hidden > dim else 0)
        self.project = nn.Linear(hidden, dim) if hidden < dim else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.output: nn.Linear | nn.Embedding
        if softmax == "full":
            self.output = nn.Linear(dim, vocab_size)
        else:
            self.output = nn.Embedding(vocab_size, dim, sparse=sparse)
            # torch's standard normal would start the logits sqrt(dim) wide.
            nn.init.normal_(self.output.weight, std=dim**-0.5)

        # A metric averages an epoch over ranks by itself; `sync_dist` would do so at every step as well.
        self.train_mean = MeanMetric()
        self.train_perplexity = Perplexity()
        self.val_perplexity = Perplexity()
        self._output_rows: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """States (B, T, dim) that score the word after each of ``inputs`` (B, T)."""
        states = self.lstm(self.dropout(self.embedding(inputs)))
        projected: Tensor = self.dropout(self.project(states))
        return projected

    def blocks(self) -> Blocks:
        """Everything with parameters that is no table."""
        named: Blocks = [("lstm", self.lstm), ("project", self.project), ("output", self.output)]
        return [(name, block) for name, block in named if isinstance(block, (Recurrent, nn.Linear))]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch."""
        states = self(batch["inputs"])
        size = batch["inputs"].size(0)
        if self.softmax == "sampled":
            # Not the negative log-likelihood of the text, hence its name, and no perplexity is made of it.
            name, loss = "train_sampled_loss", self._sampled_loss(states, batch)
        else:
            logits = self.output(states)
            name, loss = "train_loss", F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
            self.train_perplexity(logits.detach(), batch["targets"])
            self.log("train_ppl", self.train_perplexity, prog_bar=True, on_step=True, on_epoch=False, batch_size=size)
        self.train_mean.update(loss.detach())
        self.log(name, loss, prog_bar=True, batch_size=size)
        self.log(f"{name}_epoch", self.train_mean, on_step=False, on_epoch=True, batch_size=size)
        return loss

    def _sampled_loss(self, states_BTD: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Cross entropy of each target among itself and the shared negatives."""
        targets_N = batch["targets"].flatten()
        # One look-up for both, so that a sharded table exchanges rows once.
        rows = self.output(torch.cat([targets_N, batch["negatives"]]))
        return sampled_cross_entropy(states_BTD.flatten(0, 1), rows, targets_N, batch["target_log_q"].flatten(), batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """True loss and perplexity, over all words whichever softmax trains."""
        logits = self._all_logits(self(batch["inputs"]))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        self.val_perplexity.update(logits, batch["targets"])
        size = batch["inputs"].size(0)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=size)
        self.log("val_ppl", self.val_perplexity, prog_bar=True, batch_size=size)

    def _all_logits(self, states: Tensor) -> Tensor:
        """Scores of all words."""
        if self.softmax == "full":
            logits: Tensor = self.output(states)
            return logits
        if self._output_rows is None:
            # Kept for the rest of the validation: weights stand still, and rows may have to come from other ranks.
            ids = torch.arange(self.vocab_size, device=states.device)
            self._output_rows = torch.cat([self.output(chunk) for chunk in ids.split(_CHUNK)])
        return states @ self._output_rows.T

    def on_validation_epoch_start(self) -> None:
        """Forget the rows of an earlier validation, also of one that did not reach its end."""
        self._output_rows = None

    def on_validation_epoch_end(self) -> None:
        """Free the rows before training goes on."""
        self._output_rows = None

    def configure_optimizers(self) -> Optimizer:
        """The one optimizer of the model."""
        return make_optimizer(self.optimizer, self.parameters(), self.lr)
