"""Nobody is at fault, and everybody late at other moments: it must neither hang nor change a number."""

from __future__ import annotations

import functools
import os
import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.training import assert_equal
from tests.tables.scripts import ALL, Script, Scripted, look, on_rank, one_process

ROWS, STEPS = 13, 120
#: seconds, reached only by a run that hangs
WATCHDOG = 200.0


class Dawdler(Scripted):
    """Sleeps now and then: between look-ups, in backward, before the optimizer steps, after a step.

    And looks up something outside training steps, where no other rank does, while others still train.
    """

    def __init__(self, optimizer: str, **tables: Any) -> None:
        super().__init__(optimizer, **tables)
        self.names = list(tables)
        # the reference plays all ranks, and in no time
        rank = os.environ.get("LOCAL_RANK")
        self.rng = None if rank is None else random.Random(int(rank))

    def dawdle(self, *_: Any) -> None:
        if self.rng is not None and self.rng.random() < 0.25:
            time.sleep(self.rng.choice([0.0005, 0.001, 0.002, 0.003, 0.02]))

    def look_up(self, call: dict[str, Any]) -> Tensor:
        self.dawdle()
        values = super().look_up(call)
        if values.requires_grad:
            values.register_hook(self.dawdle)
        return values

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.dawdle()

    def on_train_batch_end(self, *_: Any) -> None:
        self.dawdle()
        if self.rng is not None and self.rng.random() < 0.2:
            with torch.no_grad():
                self.get_submodule(self.rng.choice(self.names))(torch.tensor([[0, ROWS - 1]]))


def scripts(rng: random.Random, names: list[str]) -> Script:
    """Between no look-up and four, in tables and of rows chosen at random."""
    return [
        look(rng.choice(names), torch.tensor([[rng.randrange(ROWS) for _ in range(3)]]), used=rng.random() < 0.9)
        for _ in range(rng.choice([0, 1, 1, 2, 3, 4]))
    ]


@pytest.mark.parametrize(("world_size", "sparse", "optimizer"), [(3, False, "adam"), (4, True, "adagrad")])
def test_random_delays(ranks: Any, world_size: int, sparse: bool, optimizer: str) -> None:
    """120 steps, each rank with its own number of look-ups in each table: the numbers of one process."""
    rng = random.Random(world_size)
    tables = {
        "words": functools.partial(nn.Embedding, ROWS, 6, sparse=sparse),
        "tags": functools.partial(nn.Embedding, ROWS, 3, sparse=sparse, padding_idx=0),
        "bags": functools.partial(nn.EmbeddingBag, ROWS, 5, sparse=sparse, mode="sum"),
    }
    data = [[scripts(rng, list(tables)) for _ in range(world_size)] for _ in range(STEPS)]
    make = functools.partial(Dawdler, optimizer, **tables)
    plain = one_process(make, data)
    assert len(plain.losses) == STEPS
    for ours in ranks(world_size).run(on_rank, make, data, ALL, timeout=WATCHDOG):
        assert_equal(ours, plain)
