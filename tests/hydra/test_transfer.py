"""Shards that are moved by a thread."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace.hydra.ledger import Ledger
from lightning_embrace.hydra.shard import Shard
from lightning_embrace.hydra.store import Store
from lightning_embrace.hydra.transfer import Transfer
from lightning_embrace.hydra.unit import Unit

CPU = torch.device("cpu")


def two_shards(store: Store) -> list[Shard]:
    units = [Unit(str(n), [nn.Parameter(torch.full((100,), float(n)))], CPU) for n in range(2)]
    for unit in units:
        unit.take_place("host", store)
    return [Shard(n, [unit]) for n, unit in enumerate(units)]


@pytest.mark.parametrize("prefetch", [True, False])
def test_what_is_hidden_is_counted(prefetch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the shard that was foreseen, one of two; without prefetch, somebody waits for both."""
    store, device = Store(CPU, Ledger("host", None), None), Ledger("device", None)
    shards = two_shards(store)
    read = Unit.read

    def slowly(self: Unit, *arguments: Any) -> None:
        time.sleep(0.1)
        read(self, *arguments)

    monkeypatch.setattr(Unit, "read", slowly)
    transfer = Transfer(2, shards[0].nbytes, CPU, store, device, prefetch)
    transfer.expect(shards[1], states=False)
    if prefetch:
        transfer.wait_for(lambda: None)
        transfer.seconds["waiting"] = 0.0
    values = [parameter_in(transfer, shard) for shard in reversed(shards)]
    assert values[0].eq(1).all() and values[1].eq(0).all()
    moving, waiting = transfer.seconds["moving"], transfer.seconds["waiting"]
    assert moving >= 0.2, "two shards were read"
    assert waiting < 0.75 * moving if prefetch else waiting > 0.75 * moving
    transfer.close()
    assert device.total == 0


def parameter_in(transfer: Transfer, shard: Shard) -> Tensor:
    transfer.enter(shard)
    value = next(shard.parameters).detach().clone()
    transfer.leave(shard)
    return value
