"""What an optimizer keeps for a table, seen on a small one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_embrace import optim
from lightning_embrace.optim.trial import count_states


class Closed(torch.optim.SGD):
    """Steps on what its closure says only."""

    def step(self, closure: Callable[[], Any]) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "sparse", "states"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), False, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), True, 1),
        (lambda p: torch.optim.Adam(p), False, 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), False, 3),
        (lambda p: torch.optim.Adagrad(p), True, 1),
        (lambda p: torch.optim.SparseAdam(p), True, 2),
        (lambda p: optim.Adam(p), True, 2),
        (lambda p: Closed(p, lr=0.1, momentum=0.9), False, 1),
    ],
)
def test_count_states(make: Callable[[Any], torch.optim.Optimizer], sparse: bool, states: int) -> None:
    """Of the table's shape; `step` counts for nothing. The optimizer itself is not touched."""
    parameter = nn.Parameter(torch.ones(9, 4))
    optimizer = make([parameter])
    before = len(optimizer.state)
    assert count_states(optimizer, optimizer.param_groups[0], sparse) == states
    assert torch.equal(parameter, torch.ones(9, 4)) and len(optimizer.state) == before
