"""Small models that use blocks in ways that are refused, some of them with a cure that makes them possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.hydra.hostile_zoo import Custom, Wrapped
from tests.hydra.zoo import Language, Stack


class FunctionalHead(Language):
    """Scores words by the matrix of their embedding, past any module."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = torch.tanh(h + block(h))
        return nn.functional.cross_entropy((h @ self.words.weight.t()).flatten(0, 1), y.flatten())


class PartOutside(Custom):
    """Calls a part of a block by itself."""

    class Block(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.body(x))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + 1e-3 * self.blocks[2].body[0](x).pow(2).mean()


class Penalty(Stack):
    """A penalty on all weights, outside of the blocks."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())


class ReturnsAGenerator(Custom):
    class Block(Wrapped):
        def forward(self, x: Tensor) -> Any:
            return (t for t in [self.body(x)])


class Leaking(Stack):
    """A loss on what a hook inside of a block hands out."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = self.blocks[2][1].register_forward_hook(lambda m, args, made: seen.append(made))
        loss = super().loss(x, y)
        handle.remove()
        return loss + seen[0].pow(2).mean()


class PartlyCompiled(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].helper = torch.compile(torch.tanh)
