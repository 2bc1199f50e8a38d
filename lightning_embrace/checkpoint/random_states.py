"""The generators of a process, as they are saved: tensors and plain values, which `weights_only` loading takes."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of the generators that everybody in this process shares: torch's, Python's and NumPy's.

    Args:
        device: This rank's device; on CUDA its generator is among them.

    Returns:
        Tensors and numbers. NumPy's is there where NumPy has been imported and draws with its usual generator.
    """
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, torch.tensor(internal), gauss]}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    numpy: Any = sys.modules.get("numpy")
    state = numpy.random.get_state(legacy=False) if numpy is not None else {}
    if state.get("bit_generator") == "MT19937":
        inner = state["state"]
        keys = torch.from_numpy(inner["key"].astype("int64"))
        states["numpy"] = [keys, int(inner["pos"]), int(state["has_gauss"]), float(state["gauss"])]
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Goes on drawing where :func:`random_states` was called.

    Args:
        states: What it returned; of another kind of device, that device's generator is left out.
        device: This rank's device.
    """
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states:
        import numpy

        keys, position, has_gauss, gauss = states["numpy"]
        numpy.random.set_state(("MT19937", keys.numpy().astype("uint32"), position, has_gauss, gauss))
