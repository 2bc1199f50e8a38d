"""What a forward finds set for its thread, found again by the second run."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_embrace.hydra.autocast import Autocast


def kernels() -> tuple[bool, bool]:
    return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()


def test_as_it_was() -> None:
    """Casts and attention's kernels, switched on as well as off; afterwards they are what they are now."""
    with torch.autocast("cpu", dtype=torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        then = Autocast("cpu")
    now = kernels()
    with then.again():
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert kernels() == (False, True)
    assert not torch.is_autocast_enabled("cpu") and kernels() == now
    plain = Autocast("cpu")
    with torch.autocast("cpu"), sdpa_kernel(SDPBackend.MATH), plain.again():
        assert not torch.is_autocast_enabled("cpu") and kernels() == now
