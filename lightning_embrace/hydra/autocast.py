"""Mixed precision as a block's forward had it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


class Autocast:
    """Whether and how torch casts, on the CPU and on a device, at one moment.

    Args:
        device_type: The device's.
    """

    def __init__(self, device_type: str) -> None:
        self._cache = torch.is_autocast_cache_enabled()
        self._types = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {"cpu", device_type}
        }

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, torch casts as it did."""
        with ExitStack() as stack:
            for kind, (enabled, dtype) in self._types.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
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
