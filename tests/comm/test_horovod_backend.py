"""What is checked before Horovod sees an AlltoAll: it would drop elements in silence, or let the other ranks hang."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_embrace.comm.horovod_backend import check_splits


@pytest.mark.parametrize(
    ("send", "send_splits", "receive_splits", "message"),
    [
        (torch.ones(3), [1, 1], [1, 1], "send_splits add up to 2"),
        (torch.ones(3), [2, 2], [1, 1], "send_splits add up to 4"),
        (torch.ones(3), [3], [1, 1], "send_splits must be 2 numbers"),
        (torch.ones(3), [4, -1], [1, 1], "send_splits must be 2 numbers from 0"),
        (torch.ones(3), [1, 2], [1, 2, 3], "receive_splits must be 2 numbers"),
        (torch.ones(3), [1, 2], [1, 1 << 31], "receive_splits must be 2 numbers"),
        (torch.ones(3, 1), [1, 2], [1, 1], "one dimension"),
        (torch.ones(6)[::2], [1, 2], [1, 1], "contiguous"),
    ],
)
def test_splits_that_do_not_fit(send: Tensor, send_splits: list[int], receive_splits: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        check_splits(send, send_splits, receive_splits, 2, "rows of step 4")
    assert "'rows of step 4'" in str(raised.value)


@pytest.mark.parametrize("splits", [[0, 0], [0, 3], [1, 2]])
def test_splits_that_fit(splits: list[int]) -> None:
    check_splits(torch.ones(sum(splits)), splits, [0, 5], 2, "rows")
