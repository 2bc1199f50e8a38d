"""Lightning's model summary of sharded tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from torch import nn

from tests.support.lifecycle import Whole, loader, make_model, make_strategy, make_trainer


class Loose(Whole):
    """With a parameter that belongs to no layer, and a layer that has a table inside."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.tower = nn.Sequential(nn.Embedding(23, 4), nn.Linear(4, 1)).double()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.tower(batch["ids"]).mean() + self.scale.mean()


def summarise(strategy: str, rich: bool, depth: int) -> list[Any]:
    """Runs in a worker: what the callback is about to print."""
    shown: list[Any] = []

    class Noting(RichModelSummary if rich else ModelSummary):  # type: ignore[misc]
        @staticmethod
        def summarize(summary_data: Any, *counts: Any, **more: Any) -> None:
            base = RichModelSummary if rich else ModelSummary
            base.summarize(summary_data, *counts, **more)
            shown.append((dict(summary_data), *counts))

    make_trainer(make_strategy(strategy), callbacks=[Noting(max_depth=depth)]).fit(make_model(cls=Loose), loader(1))
    return shown


@pytest.mark.parametrize(("rich", "depth"), [(False, 1), (True, 2)])
def test_logical_sizes_with_the_shards_beside(ranks, rich, depth):
    """All that ``ddp`` says stays true of the whole model; one more column has what this rank holds."""
    ((theirs, *their_counts),), _ = ranks(2).run(summarise, "ddp", rich, depth)
    ((ours, *our_counts),), nothing = ranks(2).run(summarise, "embrace", rich, depth)
    here = dict(zip(ours["Name"], ours.pop("Params per Device")))
    assert nothing == [], "rank 0 alone prints"
    types = ours.pop("Type")
    assert {t.removeprefix("Sharded") for t in types} == set(theirs.pop("Type"))
    assert ours == theirs and our_counts == their_counts
    assert here["words"].strip() == str(23 * 3) and here["head"].strip() == str(5 + 1)
    assert here["tower"].strip() == str(23 * 2 + 5)


def again() -> list[str]:
    """Runs in a worker: the callback afterwards."""
    callback = ModelSummary()
    make_trainer(make_strategy("embrace"), callbacks=[callback]).fit(make_model(), loader(1))
    return sorted(set(vars(callback)) - {"log", "log_dict"})  # Lightning's own leavings


def test_the_callback_is_left_as_it_was(ranks):
    """It may go to another Trainer."""
    assert ranks(2).run(again) == [sorted(vars(ModelSummary()))] * 2
