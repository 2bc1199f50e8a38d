"""The dry run: a table of 40 GB is declared and partitioned, and no memory is taken for it."""

from __future__ import annotations

import functools
import resource

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_embrace import plan_of


class Large(LightningModule):
    """A large table made in ``configure_model``, a small one in ``__init__``, and a tied one."""

    def __init__(self, rows: int = 80_000_000) -> None:
        super().__init__()
        self.rows = rows
        self.small = nn.Embedding(10, 4)
        self.words = None

    def configure_model(self) -> None:
        if self.words is None:
            self.words = nn.Embedding(self.rows, 128, padding_idx=0)
            self.tied = nn.Embedding(self.rows // 4, 128)
            self.out = nn.Linear(128, self.rows // 4, bias=False)
            self.out.weight = self.tied.weight


def test_forty_gigabytes() -> None:
    """Places, columns and bytes by rank; the process has not grown by a tenth of a percent of the table."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = plan_of(Large, 6)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 40_000_000
    words, small, tied = (next(t for t in plan.tables if t.name == name) for name in ("words", "small", "tied"))
    assert (words.rows, words.columns, words.place) == (80_000_000, 128, "sharded")
    assert words.ranges == [(0, 22), (22, 44), (44, 66), (66, 88), (88, 110), (110, 128)]
    assert words.nbytes == [80_000_000 * 22 * 4] * 5 + [80_000_000 * 18 * 4]
    assert sum(words.nbytes) == 80_000_000 * 128 * 4
    assert small.place == "replicated" and small.nbytes == [160] * 6
    assert tied.place == "dense" and tied.ranges == [(0, 128)] * 6
    assert plan.nbytes()[5] == words.nbytes[5] + 160 + tied.nbytes[0]


def test_a_module_of_ones_own() -> None:
    """A plain module that was built on the meta device, with patterns, and a class with arguments."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(10, 5), nn.EmbeddingBag(10, 6))
    plan = plan_of(module, 2, ["*", "!1"])
    assert [(t.place, t.ranges) for t in plan.tables] == [
        ("sharded", [(0, 3), (3, 5)]),
        ("replicated", [(0, 6), (0, 6)]),
    ]
    assert plan_of(functools.partial(Large, rows=400_000), 2).tables[1].rows == 400_000


def test_refused() -> None:
    """As the strategy would refuse it."""
    with pytest.raises(ValueError, match="matches no embedding"):
        plan_of(Large, 2, ["nothing"])
    with pytest.raises(ValueError, match=r"world_size=0\): give a positive number"):
        plan_of(Large, 0)
