"""Calls that are run twice: what is saved, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace.hydra.tape import Block, BlockError


class Keeper:
    """Parameters never leave; counts what happens."""

    def __init__(self, hold: bool = False) -> None:
        self.hold = hold
        self.events: list[str] = []

    @contextmanager
    def forward_of(self, block: Block) -> Iterator[None]:
        self.events.append("forward")
        yield

    @contextmanager
    def backward_of(self, block: Block) -> Iterator[None]:
        self.events.append("backward")
        yield

    def taped(self, block: Block, tensors: Any) -> None:
        self.events.append("taped")

    def may_hold(self, call: Any) -> bool:
        return self.hold

    def released(self, call: Any) -> None:
        self.events.append("released")


def block_of(module: nn.Module, hold: bool = False) -> Block:
    return Block("the.block", module, next(module.parameters()), Keeper(hold), torch.device("cpu"))


class Body(nn.Linear):
    """Calls a function on what it is given."""

    def __init__(self, function: Any) -> None:
        super().__init__(3, 3)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    return nn.functional.linear(x, module.weight, module.bias)


@pytest.mark.parametrize("hold", [False, True])
def test_gradients(hold: bool) -> None:
    """Of parameters and inputs, also where only some outputs are used and the output is changed in place."""
    module = Body(lambda m, x, y: (torch.tanh(linear(x, m)) * y, x.sum(), y > 0))
    x, y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    plain = module(x, y)[0].pow(2).sum()
    plain.backward()
    expected = [t.grad for t in (module.weight, module.bias, x)]
    for t in (module.weight, module.bias, x):
        t.grad = None
    block = block_of(module, hold)
    made, _, positive = block(x, y)
    assert positive.dtype == torch.bool and not positive.requires_grad
    made += 0
    loss = made.pow(2).sum()
    loss.backward()
    assert loss.item() == plain.item()
    for ours, theirs in zip((module.weight.grad, module.bias.grad, x.grad), expected):
        assert torch.equal(ours, theirs)


def test_no_tape_where_nothing_needs_a_gradient() -> None:
    block = block_of(Body(lambda m, x: linear(x, m)))
    with torch.no_grad():
        block(torch.ones(1, 3))
    block.module.requires_grad_(False)
    assert not block(torch.ones(1, 3)).requires_grad
    assert block.keeper.events == ["forward", "forward"]


def test_what_is_handed_on_is_the_same_tensor() -> None:
    x = torch.ones(1, 3)
    made, same = block_of(Body(lambda m, x: (linear(x, m), x)))(x)
    assert same is x and made.requires_grad


def test_activations_are_not_kept() -> None:
    """Of the first run only the inputs are saved."""
    saved: list[Tensor] = []
    block = block_of(nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 3)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        block(torch.ones(2, 3))
    assert [tuple(t.shape) for t in saved] == [(2, 3)]


class Cache:
    """What changes while it is used."""


def grow(module: nn.Module, x: Tensor, seen: list[Tensor]) -> Tensor:
    seen.append(x)
    return linear(x, module)


@pytest.mark.parametrize(
    ("function", "arguments", "match"),
    [
        (lambda m, x, cache: x, lambda x: (x, Cache()), r"'the.block' is given a Cache \(.*use_cache=False"),
        (lambda m, x: (linear(x, m), Cache()), lambda x: (x,), r"'the.block' returns a Cache"),
        (lambda m, x: linear(x.add_(1), m), lambda x: (x,), r"'the.block' changes its input tensor 0 .*x = x \+ y"),
        (grow, lambda x: (x, []), r"'the.block' changes a list or dict"),
    ],
)
def test_refused(function: Any, arguments: Any, match: str) -> None:
    """What would give wrong gradients names the block and a cure."""
    with pytest.raises(BlockError, match=match):
        block_of(Body(function))(*arguments(torch.ones(1, 3)))


def remember(module: Body, x: Tensor) -> Tensor:
    module.seen = [linear(x, module)]
    return module.seen[0]


def remember_detached(module: Body, x: Tensor) -> Tensor:
    made = linear(x, module)
    module.seen = made.detach()
    return made


def count(module: Body, x: Tensor) -> Tensor:
    module.calls = getattr(module, "calls", 0) + 1
    return linear(x, module)


@pytest.mark.parametrize(
    ("function", "match"),
    [(remember, "keeps a tensor in its attribute `seen`.*detached"), (count, "attribute `calls`.*register_buffer")],
)
def test_talking_through_attributes(function: Any, match: str) -> None:
    """Seen in the first backward, before anything is stepped."""
    made = block_of(Body(function))(torch.ones(1, 3))
    with pytest.raises(BlockError, match=match):
        made.sum().backward()


def test_what_is_kept_detached() -> None:
    block_of(Body(remember_detached))(torch.ones(1, 3)).sum().backward()


def test_an_input_that_is_changed_afterwards() -> None:
    x = torch.ones(1, 3)
    made = block_of(Body(lambda m, x: linear(x, m)))(x)
    x += 1
    with pytest.raises(BlockError, match=r"given has been changed in place"):
        made.sum().backward()


def test_gradients_of_chosen_tensors() -> None:
    """``torch.autograd.grad`` would give parameters gradients that nobody asked for."""
    x = torch.ones(1, 3, requires_grad=True)
    made = block_of(Body(lambda m, x: linear(x, m)))(x)
    with pytest.raises(BlockError, match=r"torch\.autograd\.grad.*'the.block'"):
        torch.autograd.grad(made.sum(), x)
