"""Columns that are filled as the whole table would be: same numbers, same generator afterwards, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace.tables import column_tensor
from lightning_embrace.tables.column_tensor import ColumnTensor, Share, _blocks, make_plain
from lightning_embrace.tables.columns import column_ranges

INITIALISERS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda w: nn.init.normal_(w, 0.5, 0.02),
    "uniform_": lambda w: nn.init.uniform_(w, -0.1, 0.3),
    "data.normal_": lambda w: w.data.normal_(mean=0.0, std=0.02),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.1),  # nothing is out of bounds
    "ones_": nn.init.ones_,
    "own generator": lambda w: nn.init.normal_(w, generator=torch.Generator().manual_seed(3)),
}
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "scale": lambda w: w.data.mul_(0.5),
    "assign scaled": lambda w: setattr(w, "data", w.data * 0.5 + 1),
    "scale rows": lambda w: w.data.div_(torch.arange(1.0, w.shape[0] + 1).unsqueeze(1)),
    "scale columns": lambda w: w.data.mul_(torch.arange(1.0, w.shape[1] + 1)),
    "row": lambda w: w.data[3].zero_(),
    "row, assigned": lambda w: w.data.__setitem__(-1, 7.0),
    "rows": lambda w: w.data[2:9].fill_(1.0),
    "rows by number": lambda w: w.data.__setitem__(torch.tensor([1, 4]), torch.arange(float(w.shape[1]))),
    "draw into rows": lambda w: w.data[4:].normal_(),
    "noise": lambda w: w.data.add_(torch.randn_like(w), alpha=0.1).mul_(torch.rand_like(w)),
    "copy": lambda w: w.data.copy_(torch.arange(float(w.numel())).view_as(w)),
    "assign data": lambda w: setattr(w, "data", torch.arange(float(w.numel())).view(w.shape)),
    "clamp": lambda w: w.data.clamp_(-0.1, 0.1),
}
ROWS = 37


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks to a table."""
    monkeypatch.setattr(column_tensor, "_BLOCK_BYTES", 1)


def columns(width: int, world_size: int, rank: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    start, stop = column_ranges(width, world_size)[rank]
    return nn.Parameter(ColumnTensor(torch.empty(ROWS, stop - start, dtype=dtype), Share(start, width)))


def filled(fill: Callable[[Tensor], Any], weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight after a draw and ``fill``, and the generator's state then."""
    torch.manual_seed(5)
    nn.init.normal_(weight)
    fill(weight)
    return weight.detach(), torch.get_rng_state()


def assert_columns_of_whole(
    fill: Callable[[Tensor], Any], width: int, world_size: int, dtype: torch.dtype = torch.float32
) -> None:
    whole, state = filled(fill, nn.Parameter(torch.empty(ROWS, width, dtype=dtype)))
    parts = []
    for rank in range(world_size):
        part, state_there = filled(fill, columns(width, world_size, rank, dtype))
        assert isinstance(part, ColumnTensor) and part.shape == (ROWS, width)
        assert torch.equal(state_there, state)
        parts.append(part.columns_Vd)
    assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("name", INITIALISERS)
@pytest.mark.parametrize(("width", "world_size"), [(5, 2), (2, 3), (16, 4), (1, 2)])
def test_initialisers(name: str, width: int, world_size: int) -> None:
    """Bit by bit, whatever the generator's groups: also with fewer columns than ranks."""
    assert_columns_of_whole(INITIALISERS[name], width, world_size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["normal_", "uniform_"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    """Each has its own way through the generator."""
    assert_columns_of_whole(INITIALISERS[name], 5, 2, dtype)


@pytest.mark.parametrize("name", CHANGES)
def test_changes(name: str) -> None:
    """What user code does to a weight after its first draw."""
    assert_columns_of_whole(CHANGES[name], 5, 2)


@pytest.mark.parametrize(
    ("rows", "width", "itemsize"), [(37, 5, 4), (1_000_000, 64, 4), (16, 1, 8), (3, 2, 4), (0, 5, 4), (33, 3, 8)]
)
@pytest.mark.parametrize("block_bytes", [1, 4096, 32 << 20])
def test_blocks(monkeypatch: pytest.MonkeyPatch, rows: int, width: int, itemsize: int, block_bytes: int) -> None:
    """They cover all rows in order; all but the last hold whole groups, and the last not less than one if there are
    several; none is larger than asked for by more than a group's rows."""
    monkeypatch.setattr(column_tensor, "_BLOCK_BYTES", block_bytes)
    blocks = _blocks(rows, width, itemsize)
    assert [a for a, _ in blocks] == [0, *(b for _, b in blocks)][: len(blocks)]
    assert (blocks[-1][1] if blocks else 0) == rows
    assert all((b - a) * width % 16 == 0 for a, b in blocks[:-1])
    assert len(blocks) < 2 or (blocks[-1][1] - blocks[-1][0]) * width >= 16
    assert all((b - a) * width * itemsize <= block_bytes + 32 * width * itemsize for a, b in blocks)


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w.norm(),
        lambda w: w @ w.T,
        lambda w: w.view(-1),
        lambda w: w[:, 0],
        lambda w: w.data.exponential_(),
        lambda w: torch.zeros(w.shape).copy_(w),
        nn.init.orthogonal_,
        nn.init.sparse_,
        lambda w: nn.functional.embedding(torch.tensor([1]), w),
        lambda w: setattr(w, "data", torch.zeros(2, 2)),
    ],
)
def test_refused(use: Callable[[Tensor], Any]) -> None:
    """What would need other ranks' columns, or numbers that come otherwise in blocks, says what may be done instead."""
    with pytest.raises((NotImplementedError, TypeError)) as info:
        use(columns(5, 2, 0)) if use is not nn.init.sparse_ else nn.init.sparse_(columns(5, 2, 0), 0.5)
    assert "from_pretrained" in str(info.value)


def test_conversions() -> None:
    """A module's ``double`` and a deep copy take the columns along."""
    module = nn.Embedding(ROWS, 5)
    module.weight = columns(5, 2, 1)
    nn.init.normal_(module.weight)
    before = module.weight.columns_Vd.clone()
    copied = copy.deepcopy(module)
    module.double()
    assert module.weight.dtype == torch.float64
    assert torch.equal(module.weight.columns_Vd, before.double())
    assert isinstance(copied.weight, nn.Parameter) and copied.weight.requires_grad
    assert torch.equal(copied.weight.columns_Vd, before) and copied.weight.columns_Vd is not before


@pytest.mark.parametrize("requires_grad", [True, False])
def test_make_plain(requires_grad: bool) -> None:
    """The object stays: references and what the user has noted on it stay valid."""
    weight: Any = columns(5, 2, 0).requires_grad_(requires_grad)
    weight.no_decay = True
    nn.init.normal_(weight)
    held = weight.columns_Vd
    tied = [weight]
    make_plain(weight)
    assert tied[0] is weight and type(weight) is nn.Parameter
    assert weight.no_decay and weight.requires_grad == requires_grad
    assert torch.equal(weight, held) and weight.shape == (ROWS, 3)
    assert weight.data_ptr() == held.data_ptr()
    if requires_grad:
        weight.sum().backward()
        assert weight.grad.shape == (ROWS, 3)
