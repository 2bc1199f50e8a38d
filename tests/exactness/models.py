"""Models whose numbers depend on how samples are spread over the ranks, and ways to train that stress the order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import OPTIMIZERS, VOCABULARY, Small

COLUMNS = 10


class Local(Small):
    """Records each rank's own loss. One process plays all ranks when it is given a list of their batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = [self.loss(b) for b in (batch if isinstance(batch, list) else [batch])]
        self.losses += [float(loss.detach()) for loss in losses]
        return torch.stack(losses).mean()


class Words(Local):
    """Two look-ups of one table, and a head.

    Args:
        optimizer: A key of ``OPTIMIZERS``.
        sparse: For the table.
        reduction: How the losses of the samples become one.
        table_options: For the embedding.
    """

    def __init__(self, optimizer: str, sparse: bool = False, reduction: str = "mean", **table_options: Any) -> None:
        super().__init__(optimizer)
        self.reduction = reduction
        self.table = nn.Embedding(VOCABULARY, COLUMNS, sparse=sparse, **table_options)
        self.head = nn.Sequential(nn.Linear(COLUMNS, 7), nn.Tanh(), nn.Linear(7, 3))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        x = torch.tanh(self.table(ids) * self.table((ids + 1) % VOCABULARY)).mean(dim=1)
        return F.mse_loss(self.head(x).mean(dim=1), batch["target"], reduction=self.reduction)


class Bags(Local):
    """A bag and a head."""

    def __init__(self, optimizer: str, **table_options: Any) -> None:
        super().__init__(optimizer)
        self.table = nn.EmbeddingBag(VOCABULARY, COLUMNS, **table_options)
        self.head = nn.Linear(COLUMNS, 3)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(self.head(torch.tanh(self.table(batch["ids"]))).mean(dim=1), batch["target"])


class NextWord(Local):
    """Cross entropy over the words, of which every rank ignores another number."""

    def __init__(self, optimizer: str, sparse: bool = False) -> None:
        super().__init__(optimizer)
        self.table = nn.Embedding(VOCABULARY, COLUMNS, sparse=sparse)
        self.head = nn.Linear(COLUMNS, VOCABULARY)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        targets = ids.roll(1, dims=1).clone()
        targets[:, : 1 + self.global_rank] = -100
        return F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), targets.flatten(), ignore_index=-100)


class Normalized(Words):
    """Batch norm, and a moving average that is kept by hand and takes part in the loss."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.norm = nn.BatchNorm1d(COLUMNS)
        self.register_buffer("average", torch.zeros(COLUMNS))
        self.register_buffer("mask", torch.ones(COLUMNS, dtype=torch.bool), persistent=False)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.norm(self.table(batch["ids"]).mean(dim=1))
        loss = F.mse_loss(self.head((x - self.average) * self.mask).mean(dim=1), batch["target"])
        # as vector-quantizing models do it: no version counter moves
        self.average.data.mul_(0.9).add_(x.detach().mean(dim=0), alpha=0.1)
        return loss


class NormalizedByHand(Normalized):
    """In manual optimization, where Lightning's ddp leaves each rank its own buffers."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.average += batch["target"].mean()


class Branches(Local):
    """Which parts a batch uses is written in it, one bit each."""

    def __init__(self, optimizer: str, sparse: bool = False) -> None:
        super().__init__(optimizer)
        self.table = nn.Embedding(VOCABULARY, COLUMNS, sparse=sparse)
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, COLUMNS, sparse=sparse) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(COLUMNS, 2) for _ in range(3))
        self.head = nn.Linear(COLUMNS, 2)

    def loss(self, batch: dict[str, Any]) -> Tensor:
        x = self.table(batch["ids"])
        out = self.head(x)
        for k in range(3):
            if batch["uses"] >> k & 1:
                out = out + self.heads[k](x * self.tables[k](batch["ids"]))
        return (out.mean(dim=(1, 2)) - batch["target"]).pow(2).mean()


class PartlyFrozen(Words):
    """A frozen layer, and a second table that is frozen."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.still = nn.Embedding(VOCABULARY, COLUMNS)
        self.still.requires_grad_(False)
        self.head[0].requires_grad_(False)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = torch.tanh(self.table(batch["ids"]) + self.still(batch["ids"])).mean(dim=1)
        return F.mse_loss(self.head(x).mean(dim=1), batch["target"])


class OnlyTable(Words):
    """The table is all that is trained."""

    def __init__(self, optimizer: str, sparse: bool) -> None:
        super().__init__(optimizer, sparse)
        self.head.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.table.parameters())


class OnlyRead(OnlyTable):
    """Looks rows up that receive no gradient: SparseAdam leaves them where they are, whatever their momentum."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            read = self.table((batch["ids"] * 3 + 2) % VOCABULARY).mean()
        return super().loss(batch) * (1 + read)


class Unfrozen(PartlyFrozen):
    """In every other epoch the frozen parts are trained, and the other ones are not."""

    def on_train_epoch_start(self) -> None:
        even = self.current_epoch % 2 == 0
        for module in (self.table, self.head[2]):
            module.requires_grad_(even)
        for module in (self.still, self.head[0]):
            module.requires_grad_(not even)


class Adversaries(Local):
    """Two optimizers taking turns, each with tables of its own; the other one's parameters are toggled off."""

    def __init__(self, toggle: bool = True) -> None:
        super().__init__("adam")
        self.automatic_optimization = False
        self.toggle = toggle
        self.generator = nn.ModuleDict({"table": nn.Embedding(VOCABULARY, COLUMNS), "out": nn.Linear(COLUMNS, COLUMNS)})
        self.judge = nn.ModuleDict({"table": nn.Embedding(VOCABULARY, COLUMNS), "out": nn.Linear(COLUMNS, 1)})

    def generate(self, batch: dict[str, Tensor]) -> Tensor:
        return self.generator["out"](torch.tanh(self.generator["table"](batch["ids"]).mean(dim=1)))

    def score(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.judge["out"](torch.tanh(x * self.judge["table"](batch["ids"][:, 0])))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        self.turn(first, -self.score(self.generate(batch), batch).mean() if not self.toggle else None, batch)
        self.turn(second, None, batch)

    def turn(self, optimizer: Any, loss: Tensor | None, batch: dict[str, Tensor]) -> None:
        if self.toggle:
            self.toggle_optimizer(optimizer)
        if loss is None:
            generating = optimizer is self.optimizers()[0]
            fake = self.generate(batch)
            score = self.score(fake if generating else fake.detach(), batch)
            loss = -score.mean() if generating else (score - batch["target"].unsqueeze(1)).pow(2).mean()
        self.losses.append(float(loss.detach()))
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.toggle:
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [OPTIMIZERS["adam"](self.generator.parameters()), OPTIMIZERS["adamw"](self.judge.parameters())]


class TwoLosses(Words):
    """Two backward passes, and look-ups between them, before one step."""

    def __init__(self, optimizer: str, sparse: bool = False) -> None:
        super().__init__(optimizer, sparse)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for factor, ids in ((1.0, batch["ids"]), (0.5, (batch["ids"] * 5 + 1) % VOCABULARY)):
            loss = factor * self.loss({**batch, "ids": ids})
            self.losses.append(float(loss.detach()))
            self.manual_backward(loss)
        optimizer.step()


class AccumulatedByHand(Words):
    """Steps after every third batch."""

    def __init__(self, optimizer: str, sparse: bool = False) -> None:
        super().__init__(optimizer, sparse)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Unsynchronized(AccumulatedByHand):
    """Calls torch's backward instead of Lightning's."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Groups(Words):
    """Settings per parameter group, and a schedule for the learning rate."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.table.parameters(), "lr": 0.05},
            {"params": self.head.parameters(), "weight_decay": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class MixedDtypes(Words):
    """Parameters in fp32 and fp64 taking turns, so that dense gradients leave in several blocks."""

    def double(self) -> Any:
        super().double()
        self.head[2].float()
        return self

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = torch.tanh(self.table(batch["ids"])).mean(dim=1)
        x = self.head[2](self.head[1](self.head[0](x)).float()).double()
        return F.mse_loss(x.mean(dim=1), batch["target"])
