"""The plan that rank 0 prints is what a step costs."""

from __future__ import annotations

import functools
import os

from lightning.pytorch import Callback
from torch import nn

from lightning_embrace.plan import table_cost
from tests.support.training import train
from tests.tables.scripts import ALL, Scripted, look

V = 12
_KINDS = ("ids", "rows", "grads")


class _Costs(Callback):
    """Estimates the step when the plan is printed."""

    def __init__(self) -> None:
        self.estimates = {}

    def on_after_backward(self, trainer, model) -> None:
        session = trainer.strategy._session
        usage = session.usage()
        self.rows = {name: u.rows for name, u in usage.items()}
        self.estimates = {s.name: table_cost(s, usage[s.name], trainer.world_size).here for s in session.specs}


def _estimate_on_rank(make_model, data):
    rank, costs = int(os.environ["LOCAL_RANK"]), _Costs()
    _, trainer = train(make_model, [[s[rank]] for s in data], ALL(), len(data[0]), callbacks=[costs])
    sent = trainer.strategy.traffic.sent
    return costs.estimates, costs.rows, sum(sent[kind] for kind in _KINDS)


def test_estimated_equals_counted(ranks):
    """Over the ranks together, the estimates of rows and of pooled bags are the bytes that were sent."""
    tables = {
        "words": functools.partial(nn.Embedding, V, 6),
        "bag": functools.partial(nn.EmbeddingBag, V, 8, mode="mean"),
    }
    large = [[1, 2, 3, 4, 5, 6], [6, 7, 8, 9, 10, 0]]
    data = [[[look("words", [1, 2, 2]), look("bag", large), look("bag", [[1, 2], [2, 1]])], [look("words", [4] * 9)]]]
    outcomes = ranks(2).run(_estimate_on_rank, functools.partial(Scripted, "sgd", **tables), data)
    estimates, rows, _ = outcomes[0]
    assert rows == {"words": (2 + 1) / 2, "bag": 11 / 2}
    assert 2 * sum(estimates.values()) == sum(sent for _, _, sent in outcomes)
