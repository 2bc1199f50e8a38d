"""On how many parameters an optimizer is stepped at a time."""

from __future__ import annotations

from typing import Any

import torch

from tests.hydra import zoo
from tests.hydra.runs import assert_same, fit, hydra


class Counting(torch.optim.AdamW):
    """Notes how many parameters without states it is given at a time, and how many with them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.without: list[int] = []
        self.with_states: list[int] = []

    def step(self, closure: Any = None) -> Any:
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        fresh = sum(p not in self.state for p in given)
        (self.without if fresh else self.with_states).append(len(given))
        return super().step(closure)


def test_states_are_made_one_by_one() -> None:
    """Until they are in their place they are beside it, on no account."""
    ours = fit(lambda: zoo.Stack(Counting), hydra(device_memory="80KiB"), zoo.batches(3))
    assert_same(ours, fit(lambda: zoo.Stack(Counting), "auto", zoo.batches(3)))
    optimizer: Any = ours.trainer.optimizers[0]
    blocks = {id(p) for p in ours.trainer.lightning_module.blocks.parameters()}
    assert optimizer.without.count(1) >= len(blocks) and max(optimizer.with_states) > 1
