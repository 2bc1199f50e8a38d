"""What a table knows of itself and of the others' requests."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_embrace.tables.request import PooledRequest
from lightning_embrace.tables.table import ShardedTable
from lightning_embrace.tables.usage import Usage, usage_of


def _table(rows: int, columns: int, world_size: int, rank: int = 0, device: str = "cpu") -> ShardedTable:
    weight = nn.Parameter(torch.empty(rows, columns, device=device))
    return ShardedTable(0, "t", weight, False, columns, rank, world_size)


@pytest.mark.parametrize(
    ("rows", "dtype"), [(2**31 - 1, torch.int32), (2**31, torch.int64), (2**33, torch.int64), (1, torch.int32)]
)
def test_ids_on_the_wire(rows, dtype):
    """Ids travel as int32 as long as every one of them fits."""
    assert _table(rows, 1, 2, device="meta").id_dtype == dtype


def test_owners():
    """With fewer columns than ranks some ranks own none and are asked nothing."""
    assert _table(3, 2, 4).owners() == [0, 1]
    assert _table(3, 5, 4).owners() == [0, 1, 2]
    assert _table(3, 5, 4).widths == [2, 2, 1, 0]


def test_usage():
    """Rows that several requests share count once for ddp's gradient, vectors and ids as they travel."""
    table = _table(9, 4, 2)
    table.asked[0] = [torch.tensor([1, 2]), torch.tensor([5])]
    table.asked_pooled[0] = [
        PooledRequest(torch.tensor([1, 7, 7]), torch.tensor([2, 0, 1]), None, True),
        PooledRequest(torch.tensor([3]), torch.tensor([1]), torch.ones(1), False),
    ]
    table.asked[1] = [torch.tensor([4])]
    # rank 0: rows 1 2 5 7 3; 3 rows and 3 + 1 bags; 3·4 + (3·4 + 3·4) + (1·8 + 1·4) bytes
    assert usage_of(table) == Usage((5 + 1) / 2, (7 + 1) / 2, (48 + 4) / 2)
    table.forget()
    assert usage_of(table) == Usage(0, 0, 0)
