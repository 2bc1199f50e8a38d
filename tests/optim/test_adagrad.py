"""Adagrad: torch's numbers, and decay on the touched rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace.optim import Adagrad
from tests.optim.gradients import all_rows, rate, run, some_rows, trained, weight

STEPS = 60


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "lr_decay": 0.1}, {"foreach": True}], ids=str)
def test_dense_gradients_get_torch_s_numbers(options: dict[str, Any]) -> None:
    assert torch.equal(
        trained(Adagrad, all_rows(STEPS), **options),
        trained(torch.optim.Adagrad, all_rows(STEPS), **options),
    )


@pytest.mark.parametrize(
    "options", [{}, {"lr_decay": 0.1, "maximize": True}, {"initial_accumulator_value": 0.5, "eps": 0.1}], ids=str
)
def test_sparse_gradients_get_torch_s_numbers(options: dict[str, Any]) -> None:
    assert torch.equal(
        trained(Adagrad, some_rows(STEPS), **options),
        trained(torch.optim.Adagrad, some_rows(STEPS), **options),
    )


@pytest.mark.parametrize("maximize", [False, True])
def test_decay_acts_on_touched_rows_alone(maximize: bool) -> None:
    rows = [nn.Parameter(row.clone()) for row in weight().detach()]
    optimizer = torch.optim.Adagrad(rows, weight_decay=0.1, maximize=maximize)
    for step, grad in enumerate(some_rows(STEPS)):
        optimizer.zero_grad()
        grad = grad.coalesce()
        for row, value in zip(grad.indices()[0].tolist(), grad.values()):
            rows[row].grad = value.clone()
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
    expected: Tensor = torch.stack([row.detach() for row in rows])
    actual = trained(Adagrad, some_rows(STEPS), weight_decay=0.1, maximize=maximize)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_a_parameter_added_later_starts_from_the_initial_sum() -> None:
    """torch creates Adagrad's state when it is built; for later groups, in their first step."""
    first, parameter = weight(), weight()
    optimizer = Adagrad([first], initial_accumulator_value=0.5)
    optimizer.add_param_group({"params": [parameter]})
    run(optimizer, parameter, some_rows(STEPS))
    assert torch.equal(parameter.detach(), trained(Adagrad, some_rows(STEPS), initial_accumulator_value=0.5))
