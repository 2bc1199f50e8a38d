"""Calls that are run twice: what is saved, and what is refused."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace.hydra.errors import BlockError
from lightning_embrace.hydra.tape import Block


class Keeper:
    """Parameters never leave; counts what happens."""

    def __init__(self, keep: bool = False) -> None:
        self.keep = keep
        self.events: list[str] = []

    @contextmanager
    def forward_of(self, block: Block) -> Iterator[None]:
        self.events.append("forward")
        yield

    @contextmanager
    def backward_of(self, call: Any, tensors: Any) -> Iterator[None]:
        self.events.append("backward")
        yield

    def taped(self, block: Block, tensors: Any) -> None:
        self.events.append("taped")

    def moves(self, tensor: Tensor) -> bool:
        return False

    def room(self, block: Block) -> int | None:
        return 1 << 20 if self.keep else None

    def kept(self, call: Any) -> None:
        self.events.append("kept")

    def released(self, call: Any) -> None:
        self.events.append("released")


def block_of(module: nn.Module, keep: bool = False) -> Block:
    block = Block("the.block", module, next(module.parameters()), Keeper(keep), torch.device("cpu"))
    block.checked = keep  # it has run twice before
    return block


class Body(nn.Linear):
    """Calls a function on what it is given."""

    def __init__(self, function: Any) -> None:
        super().__init__(3, 3)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    return nn.functional.linear(x, module.weight, module.bias)


@pytest.mark.parametrize("keep", [False, True])
def test_gradients(keep: bool) -> None:
    """Of parameters and inputs, also where only some outputs are used and the output is changed in place."""
    module = Body(lambda m, x, y: (torch.tanh(linear(x, m)) * y, x.sum(), y > 0))
    x, y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    plain = module(x, y)[0].pow(2).sum()
    plain.backward()
    expected = [t.grad for t in (module.weight, module.bias, x)]
    for t in (module.weight, module.bias, x):
        t.grad = None
    block = block_of(module, keep)
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
    module.seen = torch.tanh(linear(x, module))
    return module.seen * 2


def hand_out(module: Body, x: Tensor) -> Tensor:
    made = x * 1.0
    module.outside.append(made)
    return linear(made, module)


def test_what_an_attribute_keeps() -> None:
    """It may be looked at, and the second run leaves it alone; a loss that depends on it is refused."""
    module = Body(remember)
    x = torch.ones(1, 3)
    block = block_of(module)
    made = block(x)
    seen = module.seen
    made.sum().backward()
    assert module.seen is seen and torch.equal(2 * seen, made)
    with pytest.raises(BlockError, match=r"a tensor that block 'the\.block' has made and not returned"):
        (block(x).sum() + module.seen.sum()).backward()


def test_what_a_closure_hands_out() -> None:
    """Also where nothing is saved for backward on the way back to the block's input."""
    module = Body(hand_out)
    module.outside = outside = deque(maxlen=1)  # the same object in every copy that is put back
    x = torch.ones(1, 3, requires_grad=True)
    block = block_of(Body(lambda m, x: hand_out(module, x)))
    block(x).sum().backward()
    made = block(x)
    with pytest.raises(BlockError, match=r"a tensor that block 'the\.block' has made and not returned"):
        (made.sum() + outside[0].sum()).backward()


def count(module: Body, x: Tensor) -> Tensor:
    module.calls = getattr(module, "calls", 0) + 1
    module.history.append(float(x[0, 0]))
    return linear(x, module) * module.calls


def test_what_a_block_counts() -> None:
    """Attributes are what they were before the first run when it runs again; what it does to them then is undone."""
    module = Body(count)
    module.history = []
    block = block_of(module)
    total = block(torch.ones(1, 3)) + block(torch.full((1, 3), 2.0))
    total.sum().backward()
    assert module.calls == 2 and module.history == [1.0, 2.0]
    assert module.weight.grad[0, 0] == 1.0 * 1 + 2.0 * 2


def test_what_is_set_between_forward_and_backward() -> None:
    """The mode of a part, for example."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    block = block_of(module)
    module.eval()
    made = block(torch.ones(1, 3))
    module.train()
    made.sum().backward()
    assert torch.equal(module[0].bias.grad, torch.ones(3)) and module.training and module[1].training


def test_a_tensor_in_an_attribute() -> None:
    """What gradients would flow through past the arguments is refused; without them it may be there."""
    module = Body(lambda m, x: linear(x, m) * m.context)
    block = block_of(module)
    context = torch.ones(1, 3, requires_grad=True) * 2
    module.context = context.detach()
    block(torch.ones(1, 3)).sum().backward()
    module.context = context
    made = block(torch.ones(1, 3))
    assert module.context is context
    with pytest.raises(BlockError, match=r"attribute `context` of block 'the\.block'.*as an argument"):
        made.sum().backward()
    module.requires_grad_(False)
    with pytest.raises(BlockError, match="gradients flow through attribute"):
        block(torch.ones(1, 3))


def test_both_runs_see_gradients_enabled() -> None:
    """Whatever depends on that does the same as in plain training; hooks on inner tensors are called once."""
    seen: list[Any] = []

    def function(module: nn.Module, x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), x.requires_grad))
        made = linear(x, module)
        made.register_hook(lambda gradient: seen.append("backward") or 2 * gradient)
        return made

    x = torch.ones(1, 3, requires_grad=True)
    block_of(module := Body(function))(x).sum().backward()
    assert seen == [(True, True), (True, True), "backward"]
    assert torch.equal(module.bias.grad, torch.full((3,), 2.0))


def test_forward_hooks_of_the_block() -> None:
    """Are called once, with what is on the tape, and may replace it."""
    module = Body(lambda m, x: linear(x, m))
    seen: list[Tensor] = []
    module.register_forward_hook(lambda m, args, made: seen.append(made))
    module.register_forward_hook(lambda m, args, kwargs, made: made * kwargs["x"], with_kwargs=True)
    block = block_of(module)
    (block(x=torch.full((1, 3), 2.0)).sum() + seen[0].sum()).backward()
    assert len(seen) == 1 and len(module._forward_hooks) == 2
    assert torch.equal(module.bias.grad, torch.full((3,), 3.0))


def test_backward_hooks_of_the_block() -> None:
    module = Body(lambda m, x: linear(x, m))
    seen: list[Any] = []
    module.register_full_backward_hook(lambda m, into, out: seen.append((into, out)))
    x = torch.ones(1, 3, requires_grad=True)
    block_of(module)(x).sum().backward()
    [((into,), (out,))] = seen
    assert torch.equal(into, x.grad) and torch.equal(out, torch.ones(1, 3))


def test_results_that_share_memory() -> None:
    """One that is part of another, or of the input, cannot be changed in silence; others can be."""
    alike = block_of(Body(lambda m, x: (made := linear(x, m), made[:, 0])))
    for made in alike(torch.ones(2, 3)):
        with pytest.raises(RuntimeError, match="being modified inplace"):
            made += 1
    part = block_of(Body(lambda m, x: (linear(x, m), x[:, 0])))
    x = torch.ones(2, 3)
    made, first = part(x)
    first += 1
    with pytest.raises(BlockError, match="given has been changed in place"):
        made.sum().backward()
    turned = block_of(Body(lambda m, x: linear(x, m).t()))(torch.ones(2, 3))
    turned += 1
    turned.sum().backward()


def test_results_in_the_memory_of_parameters() -> None:
    """Others will be there soon: they are copied, with and without a tape."""
    module = Body(lambda m, x: (linear(x, m), m.weight[0], m.bias))
    block = block_of(module)
    before = module.weight[0].detach().clone()
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            made, row, bias = block(torch.ones(1, 3))
        storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
        assert not storages & {row.untyped_storage().data_ptr(), bias.untyped_storage().data_ptr()}
        assert torch.equal(row, before)
        if gradients:
            (made.sum() + 2 * row.sum()).backward()
    assert torch.equal(module.weight.grad, torch.tensor([[3.0] * 3, [1.0] * 3, [1.0] * 3]))


def test_results_without_a_gradient() -> None:
    """They say so, as in plain training; a call whose results have none is not waited for."""
    module = Body(lambda m, x: (linear(x, m).detach(), x, None, linear(x, m).argmax()))
    block = block_of(module)
    x = torch.ones(1, 3)
    made, same, nothing, index = block(x)
    assert not made.requires_grad and same is x and nothing is None and not index.is_floating_point()
    assert block.keeper.events == ["forward"]
    assert block_of(Body(lambda m, x: x))(x) is x


def own_generator(module: Body, x: Tensor) -> Tensor:
    return linear(x, module) * module.draw.random()


def write(module: Body, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.bias += 1
    return linear(x, module)


def add_up(module: Body, x: Tensor) -> Tensor:
    module.sum += x.detach().sum()
    return linear(x, module)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (own_generator, "gives other numbers when it runs again.*generator"),
        (write, r"changes a parameter in its forward.*register_buffer"),
        (add_up, r"changes its attribute `sum` in place.*register_buffer"),
        (lambda m, x: linear(x.relu_(), m), "changes what it is given in place.*inplace=True"),
    ],
)
def test_what_could_not_be_repeated(function: Any, match: str) -> None:
    module = Body(function)
    module.draw, module.sum = random.Random(0), torch.zeros(())
    x = torch.ones(1, 3, requires_grad=True)
    with pytest.raises(BlockError, match=match):
        block_of(module)(x).sum().backward()


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
