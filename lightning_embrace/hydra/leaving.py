"""Where parameters are when they are ordinary again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lightning_embrace.hydra.building import LEAST, mapped_copy
from lightning_embrace.hydra.unit import Unit
from lightning_embrace.memory import UNKNOWN, available_bytes

#: beside tensors
_SPARE = 64 << 20


def maker_for(units: Sequence[Unit], folder: Path | None, budget: int | None) -> Callable[[Tensor], Tensor]:
    """What makes ordinary tensors in host memory, or in mapped files where they do not fit there.

    Args:
        units: All units; those that are not on the device are to be ordinary again.
        folder: For the files. None: there are none.
        budget: What all budgets of host memory allow, or None.

    Returns:
        Copies a tensor.
    """
    away = [
        (unit, section.nbytes) for unit in units if unit.place != "device" for section in (unit.weights, unit.states)
    ]
    need = sum(nbytes for _, nbytes in away)
    room, available = budget, available_bytes()
    if available != UNKNOWN:
        # what is in host memory leaves one place there for another; each section is there twice for a moment
        there = sum(nbytes for unit, nbytes in away if unit.place == "host")
        left = available + there - max((nbytes for _, nbytes in away), default=0) - _SPARE
        room = left if room is None else min(room, left)
    if folder is None or room is None or need <= room:
        return torch.clone
    return partial(_large_ones_mapped, folder=folder)


def _large_ones_mapped(tensor: Tensor, folder: Path) -> Tensor:
    return mapped_copy(tensor, folder) if tensor.nbytes >= LEAST and tensor.is_contiguous() else tensor.clone()
