"""What a session does before there is a plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_embrace import HydraStrategy
from tests.hydra import zoo
from tests.hydra.runs import assert_same, fit


class Parked(HydraStrategy):
    """Takes blocks off the device before the optimizer is known, as it does on CUDA."""

    def model_to_device(self) -> None:
        assert self._session is not None
        self._session.park()
        assert all(unit.place != "device" for unit in self._session.units)
        super().model_to_device()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_parked_before_it_is_known_what_the_optimizer_keeps(tier: str, tmp_path: Path) -> None:
    """There is room for its states afterwards."""
    make = partial(zoo.Stack, lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    where = {"disk": tmp_path, "host_memory": "4KiB"} if tier == "disk" else {}
    ours = fit(make, Parked(device_memory="120KiB", **where), zoo.batches(5))
    assert_same(ours, fit(make, "auto", zoo.batches(5)))
