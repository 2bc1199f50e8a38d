"""Clipping equals torch's on whole gradients; a sparse one counts as the dense one it stands for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace.optim.clipping import Tell, alone, clip_by_norm, clip_by_value, norms

NORMS = [1.0, 2.0, 3.0, math.inf]


def parameters() -> list[nn.Parameter]:
    """A dense one, a sparse one with a row that occurs twice, and one without a gradient."""
    torch.manual_seed(3)
    made = [nn.Parameter(torch.zeros(4, 6, dtype=torch.float64)) for _ in range(3)]
    made[0].grad = torch.randn(4, 6, dtype=torch.float64)
    rows = torch.randn(3, 6, dtype=torch.float64)
    made[1].grad = torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), rows, (4, 6), check_invariants=True)
    return made


def dense(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("bound", [0.3, 1e3])
def test_by_norm_equals_torch(norm_type: float, bound: float) -> None:
    """A row that occurs twice counts with its sum; gradients below the bound stay as they are."""
    ours, whole = parameters(), parameters()
    whole[1].grad = dense(whole[1])
    expected = nn.utils.clip_grad_norm_(whole, bound, norm_type)
    total = clip_by_norm(alone, ours, set(), bound, norm_type)
    torch.testing.assert_close(total, expected)
    for mine, other in zip(ours[:2], whole[:2]):
        torch.testing.assert_close(dense(mine), dense(other))
    assert ours[2].grad is None


def test_by_value_equals_torch() -> None:
    ours, whole = parameters(), parameters()
    whole[1].grad = dense(whole[1])
    nn.utils.clip_grad_value_(whole, 0.2)
    clip_by_value(ours, 0.2)
    for mine, other in zip(ours[:2], whole[:2]):
        torch.testing.assert_close(dense(mine), dense(other))


def beside(other: list[Tensor], norm_type: float) -> Tell:
    """Rank 0 of two; the other one has the other columns."""

    def tell(words: Sequence[int]) -> list[list[int]]:
        theirs = torch.stack([torch.linalg.vector_norm(o, norm_type) for o in other])
        return [list(words), theirs.view(torch.int64).tolist()]

    return tell


@pytest.mark.parametrize("norm_type", NORMS)
def test_a_shard_counts_with_the_others_columns(norm_type: float) -> None:
    """And what every rank has counts once."""
    whole = [torch.randn(4, 6, dtype=torch.float64) for _ in range(2)]
    found = norms(beside([whole[0][:, 3:]], norm_type), [whole[0][:, :3], whole[1]], [True, False], norm_type)
    torch.testing.assert_close(found, torch.stack([torch.linalg.vector_norm(w, norm_type) for w in whole]))


@pytest.mark.parametrize("norm_type", [0.0, -1.0, -math.inf, math.nan])
def test_norms_that_shards_cannot_be_put_together_to(norm_type: float) -> None:
    """torch has them; of a shard they would be other numbers on every rank."""
    with pytest.raises(ValueError, match=r"sharded table was asked for with norm_type=.*positive number or math\.inf"):
        norms(alone, [torch.ones(2)], [True], norm_type)


def test_half_precision_does_not_overflow() -> None:
    """The sum of squares of a gradient that fits fp16 need not fit it."""
    gradient = torch.full((4, 6), 300.0, dtype=torch.float16)
    assert float(norms(alone, [gradient], [True], 2.0)) == pytest.approx(300.0 * 24**0.5)
    whole = torch.full((100, 100), 60000.0, dtype=torch.float16)
    assert float(norms(alone, [whole], [False], 2.0)) == pytest.approx(60000.0 * 100, rel=1e-3)


def test_no_gradient_at_all() -> None:
    assert float(clip_by_norm(alone, [nn.Parameter(torch.ones(2))], set(), 1.0)) == 0.0
