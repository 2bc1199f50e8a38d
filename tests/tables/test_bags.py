"""Bags in one form: values, gradients and refusals are those of torch's embedding_bag."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lightning_embrace.tables.bags import pooled_is_smaller, to_bags
from lightning_embrace.tables.request import PooledRequest
from lightning_embrace.tables.table import ShardedTable

ROWS, COLUMNS = 9, 3


@st.composite
def _calls(draw):
    """Arguments of embedding_bag: 2-D or with offsets (both kinds), padding, weights, mode."""
    mode = draw(st.sampled_from(["sum", "mean", "max"]))
    id_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    last = draw(st.booleans())
    if draw(st.booleans()):
        shape = draw(st.tuples(st.integers(0, 4), st.integers(1, 4)))
        count, offsets = shape[0] * shape[1], None
    else:
        sizes = draw(st.lists(st.integers(0, 4), max_size=5))
        count = sum(sizes)
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        offsets = torch.tensor([*starts, count] if last else starts, dtype=id_dtype)
        shape = (count,)
    ids = draw(st.lists(st.integers(0, ROWS - 1), min_size=count, max_size=count))
    padding = draw(st.sampled_from([None, 0, ROWS - 1, *ids[:1]]))
    weights = None
    if mode == "sum" and draw(st.booleans()):
        values = draw(st.lists(st.integers(-3, 3), min_size=count, max_size=count))
        weights = torch.tensor(values, dtype=torch.float64).view(shape)
    return torch.tensor(ids, dtype=id_dtype).view(shape), offsets, weights, mode, padding, last


def _torch(call, table, weights):
    ids, offsets, _, mode, padding, last = call
    return F.embedding_bag(
        ids,
        table,
        offsets,
        mode=mode,
        per_sample_weights=weights,
        include_last_offset=last and offsets is not None,
        padding_idx=padding,
    )


def _ours(call, table, weights):
    ids, offsets, _, mode, padding, last = call
    bags = to_bags(ids, offsets, weights, mode == "mean", padding, last)
    return bags, F.embedding_bag(bags.ids_L, table, bags.offsets_B(), mode=mode, per_sample_weights=bags.weights_L)


@settings(deadline=None)
@given(_calls())
def test_values_and_gradients(call):
    """Whatever form the bags came in: values, row gradients and weight gradients equal torch's."""
    start = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain, mine = (start.clone().requires_grad_() for _ in range(2))
    weights = [None if call[2] is None else call[2].clone().requires_grad_() for _ in range(2)]
    expected = _torch(call, plain, weights[0])
    bags, values = _ours(call, mine, weights[1])
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)
    factor = torch.arange(1.0, values.numel() + 1, dtype=torch.float64).view_as(values)
    (expected * factor).sum().backward()
    (values * factor).sum().backward()
    torch.testing.assert_close(mine.grad, plain.grad, rtol=0, atol=1e-12)
    if weights[0] is not None:
        torch.testing.assert_close(weights[1].grad, weights[0].grad, rtol=0, atol=1e-12)
    if call[3] != "max":  # what an owner computes from the gradients of pooled vectors
        rows = bags._replace(weights_L=None if call[2] is None else bags.weights_L.detach()).row_gradients(factor)
        summed = torch.zeros_like(start).index_add_(0, bags.ids_L, rows)
        torch.testing.assert_close(summed, plain.grad, rtol=0, atol=1e-12)


def test_ids_behind_the_last_offset_are_in_no_bag():
    """torch's documentation has it so; its kernels read over the end there, forward and backward."""
    bags = to_bags(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2, 3]), None, False, None, True)
    assert bags.ids_L.tolist() == [1, 2, 3]
    assert bags.sizes_B.tolist() == [2, 1]


_FLAT = torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    ("ids", "offsets", "weights", "last", "message"),
    [
        (_FLAT, None, None, False, "offsets has to be a 1D Tensor but got None"),
        (_FLAT[0], None, None, False, "got Tensor of dimension 0"),
        (_FLAT.view(1, 1, 3), None, None, False, "got Tensor of dimension 3"),
        (_FLAT.view(1, 3), torch.tensor([0]), None, False, "offsets has to be None"),
        (_FLAT, torch.tensor([[0, 1]]), None, False, "offsets has to be a 1D Tensor"),
        (_FLAT, torch.tensor([0.0, 1.0]), None, False, "int32 or int64"),
        (_FLAT, torch.tensor([1, 2]), None, False, "must begin with 0"),
        (_FLAT, torch.tensor([0, 4]), None, False, "not exceed the 3 ids"),
        (_FLAT, torch.tensor([0, 4]), None, True, "not exceed the 3 ids"),
        (_FLAT, torch.tensor([0, 2, 1]), None, False, "not decrease"),
        (_FLAT, torch.tensor([], dtype=torch.int64), None, True, "at least 1"),
        (_FLAT, torch.tensor([], dtype=torch.int64), None, False, "must begin with 0"),
        (_FLAT, torch.tensor([0]), torch.ones(2), False, "same shape as the input"),
    ],
)
def test_refusals(ids, offsets, weights, last, message):
    """What torch refuses, and what makes it read over the end, is refused with the values that were given."""
    with pytest.raises(ValueError, match=message):
        to_bags(ids, offsets, weights, False, None, last)


def _table(columns: int, world_size: int, wire_dtype: torch.dtype | None = None) -> ShardedTable:
    weight = nn.Parameter(torch.empty(ROWS, columns, dtype=torch.float64))
    return ShardedTable(0, "t", weight, False, columns, 0, world_size, wire_dtype)


def _bags(sizes: list[int], ids: list[int], weighted: bool = False) -> PooledRequest:
    weights = torch.ones(len(ids), dtype=torch.float64) if weighted else None
    return PooledRequest(torch.tensor(ids), torch.tensor(sizes), weights, False)


@pytest.mark.parametrize(
    ("table", "bags", "here", "backward", "pooled"),
    [
        # 2 ranks, D = 16 fp64: a vector is 64 bytes to and 64 from the other rank, an id 4, a bag's size 4
        (_table(16, 2), _bags([3, 3], [0, 1, 2, 3, 4, 5]), [], True, True),  # 2·128 + 6·4 + 2·4 < 6·(128 + 4)
        (_table(16, 2), _bags([2, 2, 2], [0, 1, 1, 0, 0, 1]), [], True, False),  # 3 vectors, 2 rows
        (_table(16, 2), _bags([1, 1], [0, 1]), [], True, False),  # equal but for the sizes
        (_table(16, 2), _bags([3, 3], [0, 1, 2, 3, 4, 5]), [0, 1, 2, 3, 4], True, False),  # one row is missing
        (_table(16, 2), _bags([3], [0, 1, 2]), [0, 1], True, False),  # 128 + 3·4 + 4 > 132
        (_table(16, 2), _bags([3], [0, 1, 2]), [0], True, True),
        # a narrow table: ids and weights weigh more than vectors
        (_table(2, 2), _bags([12], [0, 1] * 6), [], True, False),  # 16 + 12·4 + 4 > 2·20
        (_table(2, 2), _bags([6], [0, 1, 2, 3, 4, 5]), [], True, True),  # 16 + 6·4 + 4 < 6·20
        (_table(2, 2), _bags([6], [0, 1, 2, 3, 4, 5], True), [], True, True),  # 16 + 6·12 + 4 = 92 < 120
        (_table(2, 2), _bags([6], [0, 1, 2, 3, 4, 5], True), [], False, False),  # 8 + 76 > 6·12
        # N = 1: nothing travels either way
        (_table(16, 1), _bags([3, 3], [0, 1, 2, 3, 4, 5]), [], True, False),
        # no bags, no rows
        (_table(16, 2), _bags([], []), [], True, False),
    ],
)
def test_pooled_exactly_when_fewer_bytes(table, bags, here, backward, pooled):
    """The choice follows the bytes, and rows that are here already cost nothing."""
    ids = torch.tensor(here, dtype=torch.int64)
    table.window.add(ids, torch.zeros(len(here), table.columns, dtype=torch.float64))
    try:
        assert pooled_is_smaller(bags, torch.unique(bags.ids_L), table, backward) is pooled
    finally:
        table.forget()


def test_pooled_counts_wire_bytes():
    """With bf16 on the wire vectors are a quarter of fp64's, ids are not."""
    bags = _bags([4], [0, 1, 0, 1])
    assert pooled_is_smaller(bags, torch.unique(bags.ids_L), _table(6, 2), True)  # 48 + 16 + 4 < 2·(48 + 4)
    assert not pooled_is_smaller(bags, torch.unique(bags.ids_L), _table(6, 2, torch.bfloat16), True)  # 32 > 2·16


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (_bags([1, 1], [3, 4]), _bags([1, 1], [3, 4]), True),
        (_bags([1, 1], [3, 4]), _bags([2, 0], [3, 4]), False),
        (_bags([1, 1], [3, 4]), _bags([1, 1], [3, 5]), False),
        (_bags([1, 1], [3, 4]), _bags([1, 1], [3, 4], True), False),
        (_bags([1, 1], [3, 4], True), _bags([1, 1], [3, 4], True), True),
        (_bags([1], [3]), _bags([1], [3])._replace(mean=True), False),
    ],
)
def test_same_request(left, right, same):
    """A repeated forward pass is recognised by everything that decides the vectors."""
    assert left.same_as(right) is same
