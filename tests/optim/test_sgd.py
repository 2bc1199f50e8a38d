"""SGD: torch's numbers for dense gradients, torch's formula row by row for sparse ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace.optim import SGD
from tests.optim.gradients import all_rows, coo, rate, run, some_rows, trained, weight

STEPS = 60


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "maximize": True, "foreach": True},
    ],
    ids=str,
)
def test_dense_gradients_get_torch_s_numbers(options: dict[str, Any]) -> None:
    assert torch.equal(
        trained(SGD, all_rows(STEPS), **options),
        trained(torch.optim.SGD, all_rows(STEPS), **options),
    )


@pytest.mark.parametrize("maximize", [False, True])
def test_sparse_gradients_without_momentum_get_torch_s_numbers(maximize: bool) -> None:
    actual = trained(SGD, some_rows(STEPS), maximize=maximize)
    expected = trained(torch.optim.SGD, some_rows(STEPS), maximize=maximize)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def by_rows(**options: Any) -> Tensor:
    """torch's SGD with a parameter of its own for each row: what has no gradient does not move."""
    rows = [nn.Parameter(row.clone()) for row in weight().detach()]
    optimizer = torch.optim.SGD(rows, **options)
    for step, grad in enumerate(some_rows(STEPS)):
        optimizer.zero_grad()
        grad = grad.coalesce()
        for row, value in zip(grad.indices()[0].tolist(), grad.values()):
            rows[row].grad = value.clone()
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
    return torch.stack([row.detach() for row in rows])


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "maximize": True, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_momentum_and_decay_act_on_touched_rows_alone(options: dict[str, Any]) -> None:
    actual = trained(SGD, some_rows(STEPS), **options)
    torch.testing.assert_close(actual, by_rows(**options), rtol=0, atol=1e-12)
    assert torch.equal(actual[-1], weight().detach()[-1])


def test_dampening_acts_on_a_row_s_first_gradient_too() -> None:
    """Else the second part of a first step would meet another formula than the first part."""
    parameter = weight()
    start = parameter.detach().clone()
    optimizer = SGD([parameter], lr=1.0, momentum=0.9, dampening=0.75)
    parameter.grad = coo([2], torch.ones(1, 5, dtype=torch.float64))
    optimizer.step()
    torch.testing.assert_close(parameter[2].detach(), start[2] - 0.25)


def test_goes_on_from_the_sparse_momentum_of_torch_s_sgd() -> None:
    """torch's SGD keeps a sparse buffer after sparse gradients; loaded here, it becomes dense."""
    parameter = weight()
    torchs = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    run(torchs, parameter, some_rows(2))
    kept = torchs.state[parameter]["momentum_buffer"].to_dense()
    ours = SGD([parameter], lr=0.1, momentum=0.9)
    ours.load_state_dict(torchs.state_dict())
    parameter.grad = coo([], torch.zeros(0, 5, dtype=torch.float64))
    ours.step()
    assert torch.equal(ours.state[parameter]["momentum_buffer"], kept)
