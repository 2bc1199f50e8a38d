"""Adam and AdamW: torch's numbers for dense gradients, SparseAdam's for sparse ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_embrace.optim import Adam, AdamW
from tests.optim.gradients import all_rows, coo, rate, run, some_rows, trained, weight

STEPS = 60


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"amsgrad": True, "maximize": True},
        {"foreach": True, "betas": (0.5, 0.9), "eps": 1e-3},
    ],
    ids=str,
)
@pytest.mark.parametrize(("ours", "torchs"), [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)])
def test_dense_gradients_get_torch_s_numbers(ours: Any, torchs: Any, options: dict[str, Any]) -> None:
    assert torch.equal(
        trained(ours, all_rows(STEPS), **options),
        trained(torchs, all_rows(STEPS), **options),
    )


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"betas": (0.5, 0.9), "eps": 1e-3}], ids=str)
def test_sparse_gradients_get_sparse_adam_s_numbers(options: dict[str, Any]) -> None:
    """Also where a step has no rows: it counts."""
    assert torch.equal(
        trained(Adam, some_rows(STEPS), **options),
        trained(torch.optim.SparseAdam, some_rows(STEPS), **options),
    )
    assert torch.equal(
        trained(AdamW, some_rows(STEPS), weight_decay=0, **options),
        trained(torch.optim.SparseAdam, some_rows(STEPS), **options),
    )


@pytest.mark.parametrize("maximize", [False, True])
def test_adam_s_decay_is_part_of_the_gradient_of_the_touched_rows(maximize: bool) -> None:
    reference = weight()
    optimizer = torch.optim.SparseAdam([reference], maximize=maximize)

    def with_decay() -> Iterator[Tensor]:
        for grad in some_rows(STEPS):
            ids = grad.coalesce().indices()[0]
            decay = (-0.1 if maximize else 0.1) * reference.detach()[ids]
            yield (grad + coo(ids.tolist(), decay)).coalesce()

    run(optimizer, reference, with_decay())
    actual = trained(Adam, some_rows(STEPS), weight_decay=0.1, maximize=maximize)
    torch.testing.assert_close(actual, reference.detach(), rtol=0, atol=1e-12)


def test_adamw_s_decay_shrinks_the_touched_rows_alone() -> None:
    reference = weight()
    optimizer = torch.optim.SparseAdam([reference])
    for step, grad in enumerate(some_rows(STEPS)):
        touched = grad.coalesce().indices()[0]
        reference.data[touched] *= 1 - rate(step) * 0.1
        reference.grad = grad
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
    actual = trained(AdamW, some_rows(STEPS), weight_decay=0.1)
    torch.testing.assert_close(actual, reference.detach(), rtol=0, atol=1e-12)
    assert torch.equal(actual[-1], weight().detach()[-1])


def test_a_learning_rate_and_betas_that_are_tensors() -> None:
    """torch takes them with one dimension too."""
    parameter, reference = weight(), weight()
    options = {"lr": torch.tensor([0.1], dtype=torch.float64)}
    betas = (torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.75, dtype=torch.float64))
    ours = AdamW([parameter], betas=betas, weight_decay=0, **options)  # type: ignore[arg-type]
    torchs = torch.optim.SparseAdam([reference], lr=0.1, betas=(0.5, 0.75))
    for grad in some_rows(9):
        parameter.grad, reference.grad = grad, grad
        ours.step()
        torchs.step()
    torch.testing.assert_close(parameter, reference, rtol=0, atol=1e-12)


def test_dense_and_sparse_gradients_of_one_parameter_share_its_state() -> None:
    parameter = weight()
    optimizer = Adam([parameter])
    run(optimizer, parameter, all_rows(3))
    run(optimizer, parameter, some_rows(4))
    run(optimizer, parameter, all_rows(2))
    assert optimizer.state[parameter]["step"] == 9
