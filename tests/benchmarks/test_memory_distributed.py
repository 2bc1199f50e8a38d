"""The claim of docs/memory.md, by exact accounting."""

from __future__ import annotations

import functools
import os

from lightning.pytorch import Callback

from lightning_embrace import EmbRaceStrategy
from tests.support.models import VOCABULARY, OneTable, batches
from tests.support.training import train

COLUMNS = 16


class Held(Callback):
    """Notes the bytes of the table and its optimizer state while it trains."""

    def on_train_end(self, trainer, module):
        weight = module.table._parameters["weight"]
        state = trainer.optimizers[0].state[weight]
        tensors = [weight, *(t for t in state.values() if t.dim() > 0)]
        self.bytes = sum(t.untyped_storage().nbytes() for t in tensors)


def held_on_rank(world_size):
    """Runs in a worker."""
    rank = int(os.environ["LOCAL_RANK"])
    data = [step[rank] for step in batches(2, world_size)]
    held = Held()
    make = functools.partial(OneTable, COLUMNS, False, "adam")
    train(make, data, EmbRaceStrategy(tables=["*"]), world_size, callbacks=[held])
    return held.bytes


def test_a_table_with_its_adam_state_takes_a_quarter_on_four_ranks(ranks):
    """Weight and both moments are shards, and no shard keeps the whole table's storage alive."""
    whole = VOCABULARY * COLUMNS * 8 * 3
    assert ranks(4).run(held_on_rank, 4) == [whole // 4] * 4
