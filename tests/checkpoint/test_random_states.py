"""Generators go on where they were, from a file that is loaded with ``weights_only=True``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_embrace.checkpoint.random_states import random_states, set_random_states

CPU = torch.device("cpu")


def draw() -> list[Any]:
    return [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(2).tolist(), np.random.randn()]


def test_goes_on(tmp_path: Path) -> None:
    """Also between the two numbers that Python's and NumPy's normal distributions draw together."""
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        draw()
        torch.save(random_states(CPU), tmp_path / "states.pt")
        expected = [draw(), draw()]
        states = torch.load(tmp_path / "states.pt", weights_only=True)
        draw()
        set_random_states(states, CPU)
        assert [draw(), draw()] == expected


def test_asking_draws_nothing() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    random_states(CPU)
    assert torch.equal(torch.rand(1), expected)


def test_another_generator_of_numpys_is_left_alone() -> None:
    """Its state has another form; nothing is saved of it, and nothing set."""
    usual = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        states = random_states(CPU)
        assert "numpy" not in states
        expected = np.random.get_bit_generator().state
        set_random_states(states, CPU)
        assert np.random.get_bit_generator().state == expected
    finally:
        np.random.set_bit_generator(usual)
