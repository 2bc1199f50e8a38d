"""Small models, one for each way in which blocks are used."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH = 24
STEPS = 20


def batches(steps: int = STEPS, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Vectors and targets."""
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(size, WIDTH, generator=g), torch.randn(size, 1, generator=g)) for _ in range(steps)]


def sentences(steps: int = STEPS, size: int = 3, length: int = 5) -> list[tuple[Tensor, Tensor]]:
    """Token ids and the ones to predict."""
    g = torch.Generator().manual_seed(0)
    return [
        (torch.randint(0, 19, (size, length), generator=g), torch.randint(0, 19, (size, length), generator=g))
        for _ in range(steps)
    ]


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05)


class Base(LightningModule):
    """A loss from a subclass, recorded step by step."""

    def __init__(self, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__()
        self.make_optimizer = optimizer
        self.losses: list[Tensor] = []

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def feed_forward(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), *extra)


class Stack(Base):
    """Residual blocks between two layers."""

    def __init__(self, optimizer: Callable[[Any], Any] = sgd, make: Callable[[], nn.Module] = feed_forward) -> None:
        super().__init__(optimizer)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(6))
        self.last = nn.Linear(WIDTH, 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return (self.last(h) - y).pow(2).mean()


class InPlace(Stack):
    """Goes on with a block's output in place, and gives all blocks one more input."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
            h += x
        return (self.last(h) - y).pow(2).mean()


class Shared(Base):
    """Gives all blocks one tensor that is trained, too."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = feed_forward()

        def forward(self, h: Tensor, shared: Tensor) -> Tensor:
            return torch.tanh(h + self.body(h) * torch.sigmoid(shared) + 0.1 * shared)

    def __init__(self, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__(optimizer)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.Block() for _ in range(6))
        self.last = nn.Linear(WIDTH, 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h, shared = x, self.first(x)
        for block in self.blocks:
            h = block(h, shared)
        return (self.last(h) - y).pow(2).mean()


class Skips(Stack):
    """Long skips, the first over all blocks."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        kept = []
        for block in self.blocks[:3]:
            h = torch.tanh(block(h))
            kept.append(h)
        for block in self.blocks[3:]:
            h = block(h) * kept.pop()
        return (self.last(h) - y).pow(2).mean()


class Twice(Stack):
    """Each block is called twice in a step, far apart."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for block in [*self.blocks, *self.blocks]:
            h = h + 0.5 * torch.tanh(block(h))
        return (self.last(h) - y).pow(2).mean()


class Frozen(Stack):
    """Some blocks are not trained; the first ones need no backward at all."""

    def __init__(self, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__(optimizer)
        for part in (self.first, self.blocks[0], self.blocks[3]):
            part.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


class Unused(Stack):
    """Some blocks are left out of some steps, and one of all."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for index, block in enumerate(self.blocks[:-1]):
            if index % 2 == 0 or len(self.losses) % 3:
                h = h + block(h)
        return (self.last(h) - y).pow(2).mean()


class Tied(Stack):
    """Blocks 0 and 4 share a layer, and blocks 1 and 2 a matrix; block 5 has the weight of a layer outside."""

    def __init__(self, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__(optimizer)
        self.blocks[4][0] = self.blocks[0][0]
        self.blocks[2][2].weight = self.blocks[1][2].weight
        self.blocks[5].append(nn.Linear(WIDTH, WIDTH))
        self.blocks[5][3].weight = self.first.weight


class Random(Base):
    """Draws from torch, Python and NumPy."""

    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = feed_forward(nn.Dropout(0.3))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) * random.uniform(0.5, 1.0) + 0.1 * float(np.random.rand())

    def __init__(self, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__(optimizer)
        self.blocks = nn.ModuleList(self.Noise() for _ in range(5))
        self.last = nn.Linear(WIDTH, 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (nn.functional.dropout(self.last(x), 0.2) - y).pow(2).mean()


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def spectral_norm() -> nn.Module:
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(WIDTH, 2 * WIDTH)),
        nn.Tanh(),
        nn.utils.spectral_norm(nn.Linear(2 * WIDTH, WIDTH)),
    )


def weight_norm() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, 2 * WIDTH)), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)
    )


@dataclass
class State:
    """What a block is given and returns."""

    hidden: Tensor
    aux: dict[str, Any]


class Structured(Base):
    """Blocks with dataclasses, keyword arguments, nested results, and inputs that they hand on as they are."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = feed_forward()

        def forward(self, state: State, *, scale: float, mask: Tensor | None = None) -> tuple[State, Tensor]:
            h = self.body(state.hidden) * scale
            if mask is not None:
                h = h.masked_fill(mask, 0.0)
            made = State(h + state.hidden, {"total": state.aux["total"] + h.sum(), "fixed": state.aux["fixed"]})
            return made, h.mean()

    def __init__(self, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__(optimizer)
        self.blocks = nn.ModuleList(self.Block() for _ in range(5))
        self.last = nn.Linear(WIDTH, 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        mask = x > 1.5
        state, extra = State(x, {"total": torch.zeros(()), "fixed": x * 2}), []
        for index, block in enumerate(self.blocks):
            state, mean = block(state, scale=1.0 + index, mask=mask if index % 2 else None)
            extra.append(mean)
        h = state.hidden + state.aux["fixed"]
        return (self.last(h) - y).pow(2).mean() + 1e-4 * state.aux["total"] + 0.01 * torch.stack(extra).sum()


class Seq2Seq(Base):
    """torch's own encoder and decoder, embeddings tied to the head."""

    def __init__(self, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__(optimizer)
        self.words = nn.Embedding(19, 16)
        self.body = nn.Transformer(16, 2, 3, 3, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 19)
        self.head.weight = self.words.weight

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        h = self.body(self.words(x), self.words(y.roll(1, 1)), tgt_mask=mask, tgt_is_causal=True)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Recurrent(Base):
    """LSTMs, each of which is given its own state of the step before."""

    def __init__(self, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__(optimizer)
        self.words = nn.Embedding(19, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, 19)
        self.states: list[Any] = [None] * 4

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x)
        for index, layer in enumerate(self.layers):
            h, state = layer(h, self.states[index])
            self.states[index] = tuple(t.detach() for t in state)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class MixedDtypes(Base):
    """Blocks whose parameters are of several dtypes, in a model of another one."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
            self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.bfloat16)
            self.down = nn.Linear(2 * WIDTH, WIDTH)
            self.shift = nn.Parameter(torch.tensor(0.5, dtype=torch.float16))
            self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(self.norm(x.double()).bfloat16())
            return self.down(torch.tanh(h).float())[:, self.order] + self.shift

    def __init__(self, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__(optimizer)
        self.blocks = nn.ModuleList(self.Block() for _ in range(6))
        self.last = nn.Linear(WIDTH, 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (self.last(x) - y).pow(2).mean()


class Language(Base):
    """Its embedding and its head are larger than its blocks."""

    def __init__(self, optimizer: Callable[[Any], Any] = sgd, tied: bool = False) -> None:
        super().__init__(optimizer)
        self.words = nn.Embedding(300, WIDTH)
        self.blocks = nn.ModuleList(feed_forward() for _ in range(4))
        self.head = nn.Linear(WIDTH, 300)
        if tied:
            self.head.weight = self.words.weight

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = h + block(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Manual(Stack):
    """Steps by hand."""

    def __init__(self, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(*batch)
        self.losses.append(loss.detach())
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class Grouped(Stack):
    """Parameter groups of unlike settings, and a scheduler that steps with every batch."""

    def configure_optimizers(self) -> Any:
        biases = [p for n, p in self.named_parameters() if n.endswith("bias")]
        others = [p for n, p in self.named_parameters() if not n.endswith("bias")]
        optimizer = torch.optim.AdamW(
            [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}], lr=0.01
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OneCycle(Stack):
    """A scheduler that changes rate and momentum with every batch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plateau(Stack):
    """A scheduler that is told the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "loss", "strict": False},
        }
