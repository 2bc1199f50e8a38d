"""Optimizer states that are made at construction."""

from __future__ import annotations

import torch
from torch import nn

from lightning_embrace.hydra.constants import Constants, made_whole


def test_adagrad_takes_no_memory_for_what_will_be_spilled() -> None:
    """One number for each state, and a whole one where the parameter stays or a step needs it."""
    spilled, other = nn.Parameter(torch.zeros(50, 40)), nn.Parameter(torch.zeros(50, 40))
    with Constants([spilled]):
        optimizer = torch.optim.Adagrad([spilled, other], initial_accumulator_value=0.5)
    state = optimizer.state[spilled]["sum"]
    assert state.shape == (50, 40) and state.untyped_storage().nbytes() == 4 and bool((state == 0.5).all())
    assert optimizer.state[other]["sum"].is_contiguous()
    made_whole(state)
    assert state.is_contiguous() and bool((state == 0.5).all())
    state += 1


def test_other_ways_to_fill() -> None:
    parameter = nn.Parameter(torch.zeros(5, 4, dtype=torch.float64))
    with Constants([parameter]):
        for made, value in (
            (torch.zeros_like(parameter, dtype=torch.float32), 0.0),
            (torch.ones_like(parameter), 1.0),
            (torch.full_like(parameter, fill_value=2.0), 2.0),
        ):
            assert made.untyped_storage().nbytes() == made.element_size() and bool((made == value).all())
        assert torch.zeros_like(torch.zeros(3)).is_contiguous()
