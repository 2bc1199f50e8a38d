"""Whether a loader draws random numbers in the training process, where the model draws its own."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_state() -> Any:
    """The state of this process' generators that everybody shares; equal as long as nobody draws."""
    state = bytes(torch.get_rng_state().tolist()), random.getstate()
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return state
    _, keys, *rest = numpy.random.get_state()
    return *state, keys.tolist(), rest
