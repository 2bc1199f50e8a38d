"""Small models that use their blocks in ways that are easily got wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.hydra.zoo import WIDTH, Base, Language, Stack, batches, feed_forward, sgd


class Wrapped(nn.Module):
    """A block around the usual layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = feed_forward(nn.Dropout(0.2))


class Custom(Stack):
    """Its blocks are of a class of its own."""

    Block: type[nn.Module]

    def __init__(self, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__(optimizer, self.Block)


class ReturnsItsInput(Custom):
    """Now and then."""

    class Block(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return x if random.random() < 0.4 else torch.tanh(x + self.body(x))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return (self.last(h) - y).pow(2).mean()


class TwiceInside(Custom):
    """A layer is used twice in a block: with mixed precision its weight is cast once, and two gradients are summed."""

    class Block(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = torch.tanh(self.body(torch.tanh(self.body(x))))
            return made


class Results(NamedTuple):
    hidden: Tensor
    nothing: None
    more: dict[str, Any]


class ManyResults(ReturnsItsInput):
    """Named tuples with dicts, None, numbers, integers, what has no gradient, and what nobody uses."""

    class Block(Wrapped):
        def forward(self, x: Tensor, flag: bool = False) -> Results:
            h = torch.tanh(x + self.body(x))
            more = {"sum": h.sum(), "index": h.argmax(-1), "plain": h.detach(), "count": 3, "unused": h * 2}
            return Results(h, None, {**more, "pair": (x, [h.mean()])})

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h, extra = self.first(x), x.new_zeros(())
        for block in self.blocks:
            made = block(h, flag=True)
            assert made.nothing is None and made.more["count"] == 3 and made.more["pair"][0] is h
            assert not made.more["plain"].requires_grad
            h = made.hidden + 0.1 * made.more["plain"]
            extra = extra + 1e-3 * made.more["sum"] * made.more["pair"][1][0]
        return (self.last(h) - y).pow(2).mean() + extra


class WithoutGradients(Stack):
    """Blocks are called for a target as well, and one in which nothing is trained; one result is not used."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        with torch.no_grad():
            target = self.blocks[4](self.blocks[1](h))
        with torch.inference_mode():
            self.blocks[2](x)
        for block in self.blocks:
            h = torch.tanh(h + block(h))
        self.blocks[3](h)
        return (self.last(h) - y).pow(2).mean() + 0.1 * (h - target).pow(2).mean()


class Hooked(Stack):
    """Hooks of the user's: some change what a block is given, returns or hands back, one is part of the loss."""

    def __init__(self, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__(optimizer)
        self.features: list[Tensor] = []
        self.looked_at: dict[int, Tensor] = {}
        self.blocks[0].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
        self.blocks[1].register_forward_hook(lambda m, args, made: torch.tanh(made))
        self.blocks[2].register_forward_hook(lambda m, args, made: self.features.append(made))
        self.blocks[3].register_full_backward_hook(lambda m, into, out: (into[0] * 0.5,))
        self.blocks[4][0].register_forward_hook(lambda m, args, made: self.looked_at.update({4: made}))
        self.blocks[4][2].register_full_backward_pre_hook(lambda m, out: (out[0] * 0.5,))
        self.blocks[5][0].register_forward_hook(lambda m, args, made: made.register_hook(lambda g: g * 0.5) and None)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.features.clear()
        loss = super().loss(x, y)
        [feature] = self.features
        assert self.looked_at[4].isfinite().all()
        return loss + 0.1 * feature.pow(2).mean()


class Checkpointed(Custom):
    """Activation checkpointing in blocks, of both kinds, and around blocks."""

    class Block(Wrapped):
        reentrant = False

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=self.reentrant)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.blocks[1].reentrant = True
        h = self.first(x)
        for index, block in enumerate(self.blocks):
            h = torch.tanh(h + (checkpoint(block, h, use_reentrant=False) if index > 3 else block(h)))
        return (self.last(h) - y).pow(2).mean()


class Thawing(Stack):
    """Freezes blocks in the middle of training, and thaws them and others."""

    def __init__(self, optimizer: Callable[[Any], Any]) -> None:
        super().__init__(optimizer)
        self.blocks[5].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.blocks[:3].requires_grad_(False)
            self.first.requires_grad_(False)
        if batch_idx == 9:
            self.blocks.requires_grad_(True)


class Added(Stack):
    """Two blocks come to the optimizer later, as a group of their own."""

    def __init__(self, optimizer: Callable[[Any], Any]) -> None:
        super().__init__(optimizer)
        self.blocks[:2].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 6:
            self.blocks[:2].requires_grad_(True)
            optimizer: Any = self.optimizers()
            optimizer.add_param_group({"params": list(self.blocks[:2].parameters()), "lr": 0.02})


class InAndOutside(Language):
    """An embedding is a part of two blocks and is looked up outside of them; its matrix is an argument of one."""

    class Block(nn.Module):
        def __init__(self, words: nn.Embedding) -> None:
            super().__init__()
            self.body = feed_forward()
            self.words = words

        def forward(self, h: Tensor, ids: Tensor, matrix: Tensor | None = None) -> Tensor:
            h = self.body(h + self.words(ids))
            return h if matrix is None else h + matrix[:1].sum()

    def __init__(self, optimizer: Callable[[Any], Any] = sgd, words: int = 19) -> None:
        super().__init__(optimizer)
        self.words, self.head = nn.Embedding(words, WIDTH), nn.Linear(WIDTH, words)
        for index in (1, 3):
            self.blocks[index] = self.Block(self.words)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x)
        h = torch.tanh(h + self.blocks[0](h))
        h = torch.tanh(h + self.blocks[1](h, x))
        h = torch.tanh(h + self.blocks[2](h))
        h = torch.tanh(h + self.blocks[3](h, ids=y, matrix=self.words.weight))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Evaluating(Base):
    """torch's encoder layers, which take another way where they do not train and nobody wants gradients."""

    def __init__(self, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__(optimizer)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 48, batch_first=True) for _ in range(4))
        self.last = nn.Linear(WIDTH, 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = x[:, None] * torch.linspace(0.5, 1, 3)[:, None]
        self.blocks.eval()
        for block in self.blocks[:3]:
            h = block(h)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            h = self.blocks[3](h)
        self.blocks.train()
        return (self.last(h[:, 0]) - y).pow(2).mean()


class TurnedAround(Custom):
    """Results that are views of what was made, changed in place afterwards."""

    class Block(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).t()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h).t()
            h += 0.1
            h *= 0.9
        return (self.last(h) - y).pow(2).mean()


class Counting(Custom):
    """What a block does depends on attributes that it, and the model, change."""

    class Block(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.time, self.norms = 0, 0, []
            self.draw = torch.Generator().manual_seed(0)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.norms.append(float(x.detach().norm()))
            made = self.body(x) * (1 + 0.1 * self.time) / (1 + 0.01 * self.calls) + 0.001 * len(self.norms)
            return made * (torch.rand(made.shape, generator=self.draw) > 0.2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for time in range(2):
            for block in self.blocks:
                block.time = time
                h = torch.tanh(h + block(h))
        assert {block.calls for block in self.blocks} == {2 * len(self.losses) + 2}
        assert {len(block.norms) for block in self.blocks} == {2 * len(self.losses) + 2}
        return (self.last(h) - y).pow(2).mean()


class InAnyOrder(Stack):
    """Each step calls blocks in another order, and some of them more than once."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for index in random.choices(range(6), k=7):
            h = torch.tanh(h + self.blocks[index](h))
        return (self.last(h) - y).pow(2).mean()


class BackwardInside(Stack):
    """Goes back by itself first, and again over the same graph: Lightning zeroes the first gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.optimizers().zero_grad()
        loss = self.loss(*batch)
        (loss * 3).backward(retain_graph=batch_idx % 3 != 1)
        if batch_idx % 3:
            loss = self.loss(*batch) + (loss if batch_idx % 3 == 2 else 0.0)
        self.losses.append(loss.detach())
        return loss


class TwoLosses(Stack):
    """By hand: two ways back before a step, over one graph."""

    def __init__(self, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        x, y = batch
        h = self.first(x)
        for block in self.blocks:
            h = torch.tanh(h + block(h))
        first, second = (self.last(h) - y).pow(2).mean(), h.pow(2).mean()
        self.losses.append((first + second).detach())
        optimizer.zero_grad()
        self.manual_backward(first, retain_graph=True)
        self.manual_backward(second)
        optimizer.step()


class PartlyPrecise(Stack):
    """Some blocks are called without mixed precision."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for index, block in enumerate(self.blocks):
            with torch.autocast("cpu", enabled=index % 2 == 0):
                h = torch.tanh(h + block(h.float()))
        return (self.last(h) - y).pow(2).mean()


class Double(Custom):
    """Blocks that are built and called in another precision than the rest."""

    class Block(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.double()).float()


class Skipping(Stack):
    """Some batches give no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 4 == 1 else loss


class StepHooks(Stack):
    """Hooks of the optimizer: one looks at all parameters, one changes the rate after each step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.5)
        optimizer.register_step_pre_hook(self.look)
        optimizer.register_step_post_hook(self.slow_down)
        return optimizer

    def look(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        assert len(optimizer.param_groups[0]["params"]) == len(list(self.parameters()))

    def slow_down(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9


class BackInValidation(Stack):
    """Goes back in validation, where nothing is to be stepped."""

    def val_dataloader(self) -> Any:
        return DataLoader(batches(2), batch_size=None)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.zero_grad()
        with torch.enable_grad():
            loss = self.loss(*batch)
        loss.backward()
        self.losses.append(loss.detach() + self.first.weight.grad.norm())
