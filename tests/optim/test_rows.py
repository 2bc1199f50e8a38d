"""What the row-sparse optimizers share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_embrace.optim import SGD, Adagrad, Adam, AdamW
from tests.optim.gradients import all_rows, coo, run, same_state, some_rows, weight

OURS = {Adam: torch.optim.Adam, AdamW: torch.optim.AdamW, SGD: torch.optim.SGD, Adagrad: torch.optim.Adagrad}
PAIRS = [(ours, torchs) for ours, torchs in OURS.items()]
OPTIONS: dict[Any, dict[str, Any]] = {SGD: {"momentum": 0.9}}


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_state_dicts_interchange_with_torch_s(ours: Any, torchs: Any) -> None:
    """A checkpoint trained here on sparse rows goes on in torch's class, and back, with the same numbers."""
    options = OPTIONS.get(ours, {})
    a = weight()
    one = ours([a], **options)
    run(one, a, some_rows(9))

    b = nn.Parameter(a.detach().clone())
    two = torchs([b], **options)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    run(one, a, all_rows(5))
    run(two, b, all_rows(5))
    assert torch.equal(a, b) and same_state(one.state_dict(), two.state_dict())

    c = nn.Parameter(b.detach().clone())
    three = ours([c], **options)
    three.load_state_dict(copy.deepcopy(two.state_dict()))
    run(one, a, some_rows(9))
    run(three, c, some_rows(9))
    assert torch.equal(a, c) and same_state(one.state_dict(), three.state_dict())


@pytest.mark.parametrize("ours", OURS)
def test_dense_and_sparse_parameters_in_one_optimizer(ours: Any) -> None:
    """As with an optimizer each: neither kind sees the other's formula, group settings or step count."""
    options = OPTIONS.get(ours, {})
    dense, rows, unused = weight(0), weight(1), weight(2)
    dense_alone, rows_alone = weight(0), weight(1)
    together = ours([{"params": [rows, unused]}, {"params": [dense], "maximize": True}], **options)
    apart = [ours([rows_alone], **options), ours([dense_alone], maximize=True, **options)]
    for sparse_grad, dense_grad in zip(some_rows(20), all_rows(20)):
        rows.grad, rows_alone.grad = sparse_grad, sparse_grad
        dense.grad, dense_alone.grad = dense_grad.clone(), dense_grad.clone()
        for optimizer in (together, *apart):
            optimizer.step()
        assert rows.grad is sparse_grad, "the gradient is the user's"
    assert torch.equal(rows, rows_alone) and torch.equal(dense, dense_alone)
    assert torch.equal(unused, weight(2))


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_hooks_run_once_and_see_every_gradient(ours: Any, torchs: Any) -> None:
    """torch wraps hooks around its class's step when that class is first built: ours called it, and they ran twice."""
    torchs([weight()])
    dense, rows = weight(0), weight(1)
    dense.grad, rows.grad = next(all_rows(1)), next(some_rows(1))
    optimizer: Optimizer = ours([dense, rows])
    seen: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(rows.grad is not None))
    optimizer.register_step_post_hook(lambda *_: seen.append(rows.grad is not None))
    optimizer.step()
    assert seen == [True, True]
    if "step" in optimizer.state[dense]:
        assert optimizer.state[dense]["step"] == optimizer.state[rows]["step"] == 1


@pytest.mark.parametrize("ours", OURS)
def test_the_closure_is_called_once_with_gradients_enabled(ours: Any) -> None:
    parameter = weight()
    before = parameter.detach().clone()
    optimizer = ours([parameter])
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        loss = nn.functional.embedding(torch.tensor([1]), parameter, sparse=True).sum()
        loss.backward()
        return loss

    assert torch.equal(optimizer.step(closure).detach(), before[1].sum())
    assert calls == [True]
    assert not torch.equal(parameter[1], before[1])


@pytest.mark.parametrize(
    ("ours", "setting"),
    [
        (Adam, "amsgrad"),
        (AdamW, "amsgrad"),
        (Adam, "differentiable"),
        (SGD, "differentiable"),
        (SGD, "fused"),
        (Adagrad, "fused"),
        (Adam, "capturable"),
    ],
)
def test_settings_without_a_meaning_for_rows_are_refused(ours: Any, setting: str) -> None:
    """Before anything has moved, and only where a gradient is sparse."""
    dense, rows = weight(0), weight(1)
    optimizer = ours([dense, rows], **{setting: True})
    dense.grad, rows.grad = next(all_rows(1)), next(some_rows(1))
    message = rf"shape \(7, 5\).*{setting}=True of lightning_embrace\.optim\.{ours.__name__} .*group with {setting}="
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(dense, weight(0)) and torch.equal(rows, weight(1))


def test_fused_unscaling_is_refused() -> None:
    """GradScaler leaves the scale to an optimizer built with fused=True; rows would move by a scaled gradient."""
    dense, rows = weight(0, torch.float32), weight(1)
    optimizer = SGD([{"params": [dense]}, {"params": [rows], "fused": None}], fused=True)
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    rows.grad = next(some_rows(1))
    with pytest.raises(ValueError, match=r"GradScaler.*fused=None"):
        optimizer.step()


def test_gradients_that_are_not_of_whole_rows_are_refused() -> None:
    parameter = weight()
    parameter.grad = torch.ones(7, 5, dtype=torch.float64).to_sparse()
    with pytest.raises(ValueError, match=r"shape \(7, 5\).*sparse_dim=2.*SparseAdam"):
        Adam([parameter]).step()


@pytest.mark.parametrize("ours", OURS)
def test_a_shard_without_columns(ours: Any) -> None:
    """With fewer columns than ranks some rank owns none: it counts steps as the others do."""
    parameter = nn.Parameter(torch.zeros(7, 0))
    optimizer = ours([parameter], weight_decay=0.1, **OPTIONS.get(ours, {}))
    for ids in ([3, 1, 1], []):
        parameter.grad = torch.sparse_coo_tensor(torch.tensor([ids]).long(), torch.zeros(len(ids), 0), (7, 0))
        optimizer.step()
    assert optimizer.state[parameter].get("step", 2) == 2


@pytest.mark.parametrize("ours", OURS)
def test_the_gradient_is_left_as_it_was(ours: Any) -> None:
    """Formulas work on copies: what else reads the gradient (a norm that is logged) finds its own numbers."""
    parameter = weight()
    grad = coo([2, 4], torch.ones(2, 5, dtype=torch.float64)).coalesce()
    parameter.grad = grad
    ours([parameter], weight_decay=0.1, maximize=True, **OPTIONS.get(ours, {})).step()
    assert torch.equal(grad.values(), torch.ones(2, 5, dtype=torch.float64))
