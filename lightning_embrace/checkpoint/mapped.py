"""Checkpoint files that are mapped instead of read: what is larger than memory stays in the file until it is cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def load_mapped(path: str, stays: Callable[[Tensor], bool], weights_only: bool | None) -> dict[str, Any]:
    """Loads a checkpoint of Lightning's without reading what may be larger than memory.

    Args:
        path: The file.
        stays: Says of a weight or an optimizer state whether it stays in the file until it is read. Nothing may keep
            such a one: the file may be written anew.
        weights_only: As in ``torch.load``.

    Returns:
        What was saved.
    """
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    return {
        key: unmapped(value, stays if key in ("state_dict", "optimizer_states") else None)
        for key, value in checkpoint.items()
    }


def unmapped(value: Any, but: Callable[[Tensor], bool] | None = None) -> Any:
    """The same in memory of its own, but for some dense tensors; dictionaries and lists stay the objects."""
    if isinstance(value, Tensor):
        return value if but is not None and value.layout == torch.strided and but(value) else value.clone()
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = unmapped(item, but)
        return value
    if type(value) is list:
        value[:] = [unmapped(item, but) for item in value]
        return value
    return copy.deepcopy(value)
