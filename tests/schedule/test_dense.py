"""The dense gradients, without processes: order, unused parameters, and what a backward pass may do to them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_embrace.comm.base import Done, Handle
from lightning_embrace.comm.fake import TwinCommunicator
from lightning_embrace.comm.queue import InlineQueue
from lightning_embrace.schedule import dense
from lightning_embrace.schedule.dense import DenseSync

COUNT = 6
SOME = st.sets(st.integers(0, COUNT - 1))
PLANNED = [f"gradients of block {k}" for k in range(COUNT)]


class Sum(TwinCommunicator):
    """The other ranks contribute fixed flat buffers, block by block."""

    def __init__(self, *others: Tensor) -> None:
        super().__init__(1 + len(others))
        self.others = others

    def all_reduce(self, flat: Tensor, kind: str, what: str, low_priority: bool = False) -> Handle:
        return Done(flat.add_(torch.stack(self.others).sum(0)))


def parameters(count: int = COUNT) -> dict[str, nn.Parameter]:
    return {f"p{k}": nn.Parameter(torch.full((2,), float(k))) for k in range(count)}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block per parameter."""
    plan = dense.plan_blocks
    monkeypatch.setattr(dense, "plan_blocks", lambda members: plan(members, block_bytes=1))


def backward(sync: DenseSync, loss: Tensor, **arguments: bool) -> None:
    sync.begin()
    loss.backward(**arguments)
    sync.send_rest()
    sync.finish()


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=50)
@given(st.permutations(range(COUNT)), SOME, SOME)
def test_the_order_is_the_plan_whatever_the_hooks_do(order: list[int], unused: set[int], frozen: set[int]) -> None:
    """Two ranks whose hooks fire in another order, or not at all, must not pair different blocks."""
    comm, params = TwinCommunicator(3), parameters()
    for k in frozen:
        params[f"p{k}"].requires_grad_(False)
    sync = DenseSync(comm, InlineQueue(), params)
    sync.begin()
    for k in order:
        if k not in unused | frozen:
            params[f"p{k}"].sum().mul(k + 1.0).backward()  # each its own backward pass: hooks fire in this order
    sync.send_rest()
    sync.finish()
    assert comm.issued() == PLANNED[: COUNT - len(frozen)]
    for k in range(COUNT):
        grad = params[f"p{k}"].grad
        if k in unused | frozen:
            assert grad is None
        else:
            assert grad is not None
            torch.testing.assert_close(grad, torch.full((2,), k + 1.0))


@pytest.mark.usefixtures("small_blocks")
def test_a_block_leaves_as_soon_as_it_and_those_before_it_are_complete() -> None:
    """The AllReduce overlaps backward; only a block whose predecessor is incomplete waits."""
    comm, params = TwinCommunicator(), parameters(3)
    sync = DenseSync(comm, InlineQueue(), params)
    sync.begin()
    params["p2"].sum().backward()  # the last one registered is the first block
    assert comm.issued() == PLANNED[:1]
    params["p0"].sum().backward()
    assert comm.issued() == PLANNED[:1]
    params["p1"].sum().backward()
    assert comm.issued() == PLANNED[:3]
    assert not [e for e in comm.events if e.operation == "wait"], "nothing waits during backward"


def test_a_parameter_that_another_rank_used_gets_its_share() -> None:
    """This rank used a alone, the other one b alone: both move here; c, which nobody used, has no gradient at all."""
    a, b, c = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    # the block is c, b, a, then their flags; the other rank's part of b's average is 3
    sync = DenseSync(Sum(torch.tensor([0.0, 3.0, 0.0, 0.0, 1.0, 0.0])), InlineQueue(), {"a": a, "b": b, "c": c})
    backward(sync, a.sum() * 4)
    assert a.grad is not None and a.grad.tolist() == [2.0]
    assert b.grad is not None and b.grad.tolist() == [3.0]
    assert c.grad is None


def test_a_gradient_that_cancels_out_is_not_an_unused_parameter() -> None:
    """AdamW moves a parameter whose gradient is zero, and does not move one without gradient."""
    a = nn.Parameter(torch.ones(1))
    sync = DenseSync(Sum(torch.tensor([-2.0, 1.0])), InlineQueue(), {"a": a})
    backward(sync, a.sum() * 4)
    assert a.grad is not None and a.grad.tolist() == [0.0]


def test_frozen_and_unfrozen_between_passes() -> None:
    """Manual optimization toggles `requires_grad`: what is frozen keeps the gradient that it has, unsent."""
    comm, params = TwinCommunicator(), parameters(2)
    sync = DenseSync(comm, InlineQueue(), params)
    backward(sync, params["p0"].sum() + params["p1"].sum())
    before = sync.fingerprint()
    params["p0"].requires_grad_(False)
    assert sync.fingerprint() != before
    backward(sync, params["p1"].sum())
    params["p0"].requires_grad_(True)
    assert sync.fingerprint() == before
    backward(sync, params["p0"].sum())
    assert [p.grad.tolist() for p in params.values() if p.grad is not None] == [[2.0, 2.0], [2.0, 2.0]]
    assert [e.elements for e in comm.events if e.operation == "all_reduce"] == [6, 3, 6]


def test_nothing_is_sent_while_gradients_accumulate() -> None:
    """Without `begin` a backward pass stays local; the next synchronised one sends the sum."""
    comm, params = TwinCommunicator(), parameters(1)
    sync = DenseSync(comm, InlineQueue(), params)
    backward(sync, params["p0"].sum())
    params["p0"].grad = None
    params["p0"].sum().backward()
    assert len(comm.issued()) == 1
    backward(sync, params["p0"].sum())
    assert params["p0"].grad is not None and params["p0"].grad.tolist() == [2.0, 2.0]


def test_a_gradient_with_a_graph_is_averaged_like_any_other() -> None:
    """`backward(create_graph=True)`, as second-order optimizers use it, runs the hooks with gradients enabled."""
    comm, a = TwinCommunicator(), nn.Parameter(torch.tensor([3.0]))
    sync = DenseSync(comm, InlineQueue(), {"a": a})
    with pytest.warns(UserWarning, match="create_graph"):
        backward(sync, (a**2).sum(), create_graph=True)
    assert a.grad is not None and a.grad.tolist() == [6.0]
    backward(sync, a.sum())  # the flat buffer has not become part of the graph
    assert a.grad.tolist() == [7.0]


def test_fp16_does_not_overflow_in_the_sum() -> None:
    """DDP divides before it sums; dividing afterwards gave infinity for gradients above 65504 / N."""
    a = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    sync = DenseSync(TwinCommunicator(4), InlineQueue(), {"a": a})
    backward(sync, a.sum() * 40000)
    assert a.grad is not None and a.grad.tolist() == [40000.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_flags_in_any_dtype(dtype: torch.dtype) -> None:
    """They travel behind the gradients in their dtype; a sum of many ranks' flags must not become zero."""
    a, b = (nn.Parameter(torch.zeros(1, dtype=dtype)) for _ in range(2))
    sync = DenseSync(TwinCommunicator(300), InlineQueue(), {"a": a, "b": b})
    backward(sync, a.sum().real)
    assert a.grad is not None
    assert b.grad is None


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_gradient_that_arrives_after_its_block_has_left_is_no_silent_loss(reentrant: bool) -> None:
    """Reentrant checkpointing accumulates a shared parameter's gradient twice; the second part was dropped."""
    shared = nn.Linear(1, 1, bias=False)
    sync = DenseSync(TwinCommunicator(), InlineQueue(), {"shared": shared.weight})
    x = torch.ones(1, requires_grad=True)
    out = x
    for _ in range(2):
        out = checkpoint(shared, out, use_reentrant=reentrant)
    if reentrant:
        with pytest.raises(RuntimeError, match=r"'shared'.*use_reentrant=False"):
            backward(sync, out.sum())
    else:
        backward(sync, out.sum())
        torch.testing.assert_close(shared.weight.grad, 2 * shared.weight.detach())


def test_hooks_can_be_removed() -> None:
    """After the fit the model is an ordinary one."""
    comm, params = TwinCommunicator(), parameters(1)
    sync = DenseSync(comm, InlineQueue(), params)
    backward(sync, params["p0"].sum())
    sync.begin()
    sync.remove_hooks()
    params["p0"].sum().backward()
    assert len(comm.issued()) == 1
