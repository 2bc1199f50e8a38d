"""Graphs that are kept while their weights leave, and come back to other memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace.hydra.call import Call
from lightning_embrace.hydra.errors import BlockError
from lightning_embrace.hydra.kept import Kept
from lightning_embrace.hydra.tape import Block
from lightning_embrace.hydra.unit import stand_in


class Moving:
    """A keeper of one slot, which holds something else as soon as a block has run."""

    def __init__(self, room: int | None = 1 << 20) -> None:
        self.limit = room
        self.runs = 0
        self.calls: list[Call] = []
        self.released_calls = 0
        self._store: list[Tensor] = []

    @contextmanager
    def forward_of(self, block: Block) -> Iterator[None]:
        self.runs += 1
        if not self._store:
            self._store = [p.data.clone() for p in block.parameters]
        slot = torch.empty(sum(p.numel() for p in block.parameters), dtype=block.parameters[0].dtype)
        start = 0
        for parameter, stored in zip(block.parameters, self._store):
            parameter.data = slot[start : start + parameter.numel()].view(parameter.shape)
            parameter.data.copy_(stored)
            start += parameter.numel()
        try:
            yield
        finally:
            slot.fill_(float("nan"))
            for parameter in block.parameters:
                parameter.data = stand_in(parameter, torch.device("cpu"))

    @contextmanager
    def backward_of(self, call: Call, tensors: Sequence[Tensor]) -> Iterator[None]:
        with self.forward_of(call.block):
            self.runs -= call._kept is not None
            yield

    def moves(self, tensor: Tensor) -> bool:
        return False

    def room(self, block: Block) -> int | None:
        return self.limit

    def kept(self, call: Call) -> None:
        self.calls.append(call)

    def released(self, call: Call) -> None:
        self.released_calls += 1

    def taped(self, block: Block, tensors: Sequence[Tensor]) -> None:
        pass


class Doubled(torch.autograd.Function):
    """Saves its weight as torch wants it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        x, weight = ctx.saved_tensors  # may be asked for twice
        return gradient @ weight * 2, gradient.t() @ x * 2


class Hidden(Doubled):
    """Keeps a view of its weight where nobody sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.view = x, weight.detach()
        return x @ weight.t() * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient @ ctx.view * 2, gradient.t() @ ctx.x * 2


class Body(nn.Module):
    """Calls a function on what it is given."""

    def __init__(self, function: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4, dtype=dtype)
        self.second = nn.Linear(4, 4, dtype=dtype)
        self.norm = nn.BatchNorm1d(4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.function(self, x)
        return made


def trained(function: Any, keeper: Moving | None, calls: int = 1, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Losses and gradients of two steps, plainly where there is no keeper."""
    module = Body(function, dtype)
    module.train(dtype == torch.float32)
    run: Any = module
    if keeper is not None:
        run = Block("the.block", module, module.first.weight, keeper, torch.device("cpu"))
        run.checked = True  # it has run twice before
    x = torch.randn(3, 4, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found: list[Any] = []
    for _ in range(2):
        torch.manual_seed(5)
        h = x
        for _ in range(calls):
            h = run(h)
        loss = h.abs().pow(2).sum()
        loss.backward()
        found += [loss.item(), x.grad, *(p.grad for p in module.parameters())]
        x.grad = None
        module.zero_grad()
    return [*found, *module.buffers()]


def assert_equal(ours: list[Any], plain: list[Any]) -> None:
    assert len(ours) == len(plain)
    for left, right in zip(ours, plain):
        assert torch.equal(left, right) if isinstance(right, Tensor) else left == right


def both(module: Body, x: Tensor) -> Tensor:
    made: Tensor = module.second(torch.tanh(module.first(x)))
    return made


def cast(module: Body, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module.first(torch.tanh(module.first(x))).float()


REPOINTED = {
    "linear": both,
    "transposed": lambda m, x: torch.relu(x @ m.first.weight.t()) @ m.first.weight,
    "part": lambda m, x: x * m.first.weight[1:2, :] @ m.second.weight[:, ::2] @ m.second.weight[1::2],
    "expanded": lambda m, x: x * m.first.bias.expand(3, 4) * m.first.weight.flatten()[3:7],
    "elementwise": lambda m, x: x @ (m.first.weight * m.second.weight).exp(),
    "normalised": lambda m, x: m.norm(torch.nn.functional.layer_norm(x, (4,), m.first.bias)),
    "random": lambda m, x: m.second(torch.dropout(m.first(x), 0.5, True)),
    "function": lambda m, x: Doubled.apply(x, m.first.weight),
    "in place": lambda m, x: m.second(m.first(x).relu_()),
    "twice": lambda m, x: m.first(torch.tanh(m.first(x))),
    "cast": cast,
}


@pytest.mark.parametrize(
    ("name", "calls"),
    # not where four gradients of one weight would be summed, in another order
    [(name, calls) for calls in (1, 2) for name in REPOINTED if calls == 1 or name not in ("transposed", "twice")],
)
def test_weights_are_looked_up_again(name: str, calls: int) -> None:
    """One run a call, bit by bit, though the weights' memory is full of NaN in between."""
    keeper = Moving()
    assert_equal(trained(REPOINTED[name], keeper, calls), trained(REPOINTED[name], None, calls))
    assert keeper.runs == len(keeper.calls) == keeper.released_calls == 2 * calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    def function(module: Body, x: Tensor) -> Tensor:
        return module.second(module.first(x) * module.first.bias)

    keeper = Moving()
    assert_equal(trained(function, keeper, dtype=dtype), trained(function, None, dtype=dtype))
    assert keeper.runs == 2


def on_the_cpu(module: Body, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():  # which is where it is
        return both(module, x)


def looked_at(module: Body, x: Tensor) -> Tensor:
    module.seen = module.first.weight.data  # an attribute, which is not needed in backward
    return both(module, x)


def as_numbers(module: Body, x: Tensor) -> Tensor:
    pairs = torch.view_as_real(torch.view_as_complex(module.first.weight.view(8, 2)) * 1j)
    return x @ pairs.view(4, 4) * module.first.weight.detach().view(torch.int32).ne(0)[:3]


def sparse(module: Body, x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(4).to_sparse(), module.first(x).t()).t()


RECOMPUTED = {
    "hidden": lambda m, x: Hidden.apply(x, m.first.weight),
    "on the cpu": on_the_cpu,
    "looked at": looked_at,
    "sparse": sparse,
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_what_would_not_be_the_same(name: str) -> None:
    """Where a graph has something of a weight's memory that is not looked up again, the call runs again instead."""
    keeper = Moving()
    assert_equal(trained(RECOMPUTED[name], keeper), trained(RECOMPUTED[name], None))
    assert keeper.runs == 4 and not keeper.calls


def test_other_views_of_weights() -> None:
    """Of another dtype, or conjugated."""
    assert_equal(trained(as_numbers, Moving()), trained(as_numbers, None))

    def conjugated(module: Body, x: Tensor) -> Tensor:
        return x * module.first.bias.conj() * module.second.bias

    for room in (None, 1 << 20):
        ours = trained(conjugated, Moving(room), dtype=torch.complex64)
        assert_equal(ours, trained(conjugated, None, dtype=torch.complex64))


def test_no_more_than_there_is_room_for() -> None:
    """What is saved beside weights and arguments is counted: the hidden layer, here."""
    for room, runs in ((3 * 4 * 4, 2), (3 * 4 * 4 - 1, 4)):
        keeper = Moving(room)
        assert_equal(trained(both, keeper), trained(both, None))
        assert keeper.runs == runs and [c.kept_bytes for c in keeper.calls] == [48, 48][: 4 - runs]


def taped(function: Any) -> tuple[Body, Moving, Any, Tensor]:
    module, keeper = Body(function), Moving()
    block = Block("the.block", module, module.first.weight, keeper, torch.device("cpu"))
    block.checked = True
    x = torch.ones(3, 4, requires_grad=True)
    return module, keeper, block, x


def test_letting_go() -> None:
    """Frees activations at once, though the graph is still there; the call runs again, and gives the same."""
    seen: list[weakref.ref[Tensor]] = []

    def function(module: Body, x: Tensor) -> Tensor:
        hidden = torch.tanh(module.first(x))
        module.hidden = hidden * 1.0
        seen.append(weakref.ref(hidden.untyped_storage()))
        return module.second(hidden)

    module, keeper, block, x = taped(function)
    plain = function(module, x)
    plain.sum().backward()
    expected = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    seen.clear()
    made = block(x)
    assert seen[0]() is not None
    keeper.calls[0].let_go()
    assert seen[0]() is None and keeper.released_calls == 1
    keeper.calls[0].let_go()
    made.sum().backward()
    assert keeper.runs == 2 and keeper.released_calls == 1
    assert_equal([p.grad for p in module.parameters() if p.grad is not None], expected)


def test_a_graph_that_nobody_needs() -> None:
    """Is freed without the garbage collector's help, once it was let go."""
    _, keeper, block, x = taped(both)
    made = block(x)
    [call] = keeper.calls
    gone = weakref.ref(call)
    gc.disable()
    try:
        call.let_go()
        keeper.calls.clear()
        del made, call
        assert gone() is None
    finally:
        gc.enable()


def test_going_back_twice() -> None:
    """The second time the call runs again: gradients are twice as large."""
    module, keeper, block, x = taped(both)
    loss = block(x).sum()
    loss.backward(retain_graph=True)
    once = module.first.weight.grad.clone()
    loss.backward()
    assert keeper.runs == 2 and torch.equal(module.first.weight.grad, 2 * once)


def test_weights_that_have_changed() -> None:
    """As in plain training that is an error, and not a wrong number."""
    module, keeper, block, x = taped(both)
    made = block(x)
    with keeper.forward_of(block), torch.no_grad():
        module.second.weight += 1
    with pytest.raises(
        BlockError, match=r"'the\.block' needs .*modified by an inplace operation.*version 2, expected 1"
    ):
        made.sum().backward()


def test_activations_that_have_changed() -> None:
    _, _, block, x = taped(lambda m, x: torch.sigmoid(m.first(x)))
    made = block(x)
    made += 1
    with pytest.raises(BlockError, match=r"'the\.block' needs .*modified by an inplace operation.*\(3, 4\)"):
        made.sum().backward()


def test_what_a_kept_graph_hands_out() -> None:
    """Nobody goes back through it past the block's results."""

    def function(module: Body, x: Tensor) -> Tensor:
        module.hidden = torch.tanh(module.first(x))
        return module.second(module.hidden)

    module, keeper, block, x = taped(function)
    made = block(x.detach())
    with pytest.raises(BlockError, match=r"a tensor that block 'the\.block' has made and not returned"):
        (made.sum() + module.hidden.sum()).backward()
    assert len(keeper.calls) == 1


def test_an_exception_amid_a_run() -> None:
    """Parameters have their memory again, and nothing is kept."""

    def function(module: Body, x: Tensor) -> Tensor:
        torch.tanh(module.first(x))
        raise KeyError("amid")

    module = Body(function)
    kept = Kept("the.block", tuple(module.parameters()), ())
    before = [(p.data_ptr(), p.untyped_storage().data_ptr()) for p in module.parameters()]
    with pytest.raises(KeyError, match="amid"), kept.recording():
        module(torch.ones(3, 4))
    assert [(p.data_ptr(), p.untyped_storage().data_ptr()) for p in module.parameters()] == before
    with pytest.raises(KeyError, match="amid"):
        taped(function)[2](torch.ones(3, 4))
