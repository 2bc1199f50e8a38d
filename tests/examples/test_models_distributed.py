"""The four models under ``embrace``: the numbers of ``ddp``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.models.registry import MODELS
from tests.support.example_models import fit_both


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *((name, {"optimizer": "adam"}) for name in MODELS),
        ("lm", {"sparse": True}),
        ("bert", {"decoder": "tied"}),
        ("gnmt", {"emulated": True}),
    ],
)
def test_equals_ddp(ranks: Any, name: str, arguments: dict[str, Any]) -> None:
    """Two ranks, three steps, fp64, all tables sharded but a tied one: weights and each rank's losses are equal."""
    for (ours, our_losses), (theirs, their_losses) in ranks(2).run(fit_both, name, 2, 3, **arguments):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}")
        assert our_losses == pytest.approx(their_losses, abs=1e-10) and len(our_losses) == 3
