"""What is measured for a plan, and what follows from it for the model's parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace.hydra.config import HydraConfig
from lightning_embrace.hydra.dryrun import planned_of
from lightning_embrace.namespaces import LIGHTNING
from tests.hydra import zoo
from tests.hydra.runs import assert_same, fit, hydra


class Tables(zoo.Base):
    """What is outside of its blocks takes a quarter of the budget, with gradients."""

    BUDGET = 8 * 2 * 60 * 16 * 4 + 1024

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.words, self.head = nn.Embedding(60, 16), nn.Linear(16, 60, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = h + block(h).tanh()
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def sentences() -> list[tuple[Tensor, Tensor]]:
    return [(x % 60, y % 60) for x, y in zoo.sentences(4, size=1, length=2)]


@pytest.mark.parametrize(("optimizer", "moved"), [(zoo.sgd, 12), (torch.optim.AdamW, 13)])
def test_states_of_what_is_outside_of_blocks(optimizer: Any, moved: int) -> None:
    """They count where tables stay: with AdamW one of them moves, and what is shown without training is the same."""
    make = partial(Tables, optimizer)
    strategy = hydra(device_memory=Tables.BUDGET)
    assert_same(fit(make, strategy, sentences()), fit(make, "auto", sentences()))
    assert len(strategy.planned.units) == moved
    with torch.device("meta"):
        model = make()
    config = HydraConfig.checked(Tables.BUDGET, None, None, "auto", True)
    assert len(planned_of(model, config, torch.device("cpu"), LIGHTNING).units) == moved


def test_a_model_that_fits_keeps_its_tables() -> None:
    strategy = hydra(device_memory=4 * Tables.BUDGET)
    fit(partial(Tables, torch.optim.AdamW), strategy, sentences())
    assert len(strategy.planned.units) == 12
