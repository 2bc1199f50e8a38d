"""What a block's forward finds set for its thread: mixed precision, and which kernels attention may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


class Autocast:
    """Whether and how torch casts, on the CPU and on a device, and by which kernels it attends, at one moment.

    Args:
        device_type: The device's.
    """

    def __init__(self, device_type: str) -> None:
        self._cache = torch.is_autocast_cache_enabled()
        self._types = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {"cpu", device_type}
        }
        self._kernels = _kernels()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, torch does as it did."""
        with ExitStack() as stack:
            for kind, (enabled, dtype) in self._types.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
            if self._kernels != _kernels():
                stack.enter_context(sdpa_kernel(self._kernels))
            yield


@contextmanager
def without_cache() -> Iterator[None]:
    """Inside, casts of weights are not kept: one that is made without a graph would be used where a graph is needed."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def _kernels() -> list[SDPBackend]:
    """Those that scaled_dot_product_attention may take."""
    allowed = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled(),
    }
    return [kernel for kernel, enabled in allowed.items() if enabled]
