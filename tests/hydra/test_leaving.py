"""Whether a model that is spilled no longer fits into host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_embrace.hydra import leaving
from lightning_embrace.hydra.building import LEAST, is_mapped
from lightning_embrace.hydra.leaving import maker_for
from lightning_embrace.hydra.ledger import Ledger
from lightning_embrace.hydra.store import Store
from lightning_embrace.hydra.unit import Unit

CPU = torch.device("cpu")
SIZE = 4 << 20


@pytest.mark.parametrize(
    ("tier", "budget", "available", "mapped"),
    [
        ("disk", None, 1 << 40, False),
        ("disk", 2 * SIZE, 1 << 40, False),
        ("disk", 2 * SIZE - 1, 1 << 40, True),  # the user has said so
        ("disk", None, 2 * SIZE + leaving._SPARE, True),  # while one is read, it is there twice
        ("disk", None, 3 * SIZE + leaving._SPARE, False),
        ("host", None, SIZE + leaving._SPARE, False),  # they are there already
    ],
)
def test_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, budget: int | None, available: int, mapped: bool
) -> None:
    monkeypatch.setattr(leaving, "available_bytes", lambda: available)
    store = Store(CPU, Ledger("host", None), tmp_path)
    units = [Unit(str(n), [nn.Parameter(torch.ones(SIZE // 4))], CPU) for n in range(2)]
    for unit in units:
        unit.take_place(tier, store)
    make = maker_for(units, tmp_path, budget)
    assert is_mapped(make(torch.ones(LEAST // 4))) == mapped
    assert not is_mapped(make(torch.ones(1))), "small tensors stay in memory"
    store.close()


def test_without_a_folder_there_are_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "available_bytes", lambda: 0)
    assert maker_for([], None, 0) is torch.clone
