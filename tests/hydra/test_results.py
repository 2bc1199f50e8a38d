"""What a block's results are known by, and whose memory they are in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_embrace.hydra.results import own_memory, same_sums, sums


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn],
)
def test_other_numbers_have_other_sums(dtype: torch.dtype) -> None:
    """As after another dropout; equal ones have equal sums, and so has what differs by the order of additions alone."""
    made = (torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).double() / 3).to(dtype)
    wide = made.to(torch.complex128 if dtype.is_complex else torch.float64)
    dropped = (wide * (torch.rand(40, 30, generator=torch.Generator().manual_seed(1)) > 0.3)).to(dtype)
    assert same_sums(sums([made]), sums([made.clone()]))
    assert not same_sums(sums([made]), sums([dropped]))
    if dtype.itemsize > 1:
        left, right = (made + dropped) + wide.flip(0).to(dtype), made + (dropped + wide.flip(0).to(dtype))
        assert not torch.equal(left, right) and same_sums(sums([left]), sums([right]))


def test_what_is_not_a_matrix_of_numbers() -> None:
    """Integers, truth, nothing, NaN, and sparse tensors."""
    nan = torch.tensor(float("nan"))
    some = [torch.arange(5), torch.tensor([True, False]), torch.zeros(0), nan, torch.eye(3).to_sparse()]
    assert same_sums(sums(some), sums([t.clone() for t in some]))
    assert not same_sums(sums([torch.arange(5)]), sums([torch.arange(5) + 1]))
    assert not same_sums(sums([nan]), sums([torch.tensor(1.0)]))
    assert not same_sums(sums(some), sums(some[1:]))


def test_memory_of_parameters() -> None:
    """Is copied where something lies in it; otherwise the result stays as it is, whatever it has in it."""
    layer = nn.Linear(2, 2)
    other = object()
    tree = {"mine": torch.ones(2), "other": other}
    assert own_memory(tree, layer.parameters()) is tree
    made = own_memory({**tree, "theirs": layer.weight[1:]}, layer.parameters())
    assert made["mine"] is tree["mine"] and made["other"] is other
    assert torch.equal(made["theirs"], layer.weight[1:])
    assert made["theirs"].untyped_storage().data_ptr() != layer.weight.untyped_storage().data_ptr()
