"""Large tensors without holes between them: what malloc does with those that others make."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

#: from here on a tensor is a mapping of its own, and gone when nobody has it
_LARGE = 4 << 20
#: what glibc ends with by itself, where large tensors come and go
_USUAL = 32 << 20
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of malloc.h


def map_large_ones() -> Callable[[], None] | None:
    """Has malloc map tensors of some MB one by one, as :func:`~lightning_embrace.hydra.layout.allocate` does.

    glibc keeps memory of up to 32 MB for the next one of its size, and a tensor begins at a multiple of 64 bytes: what
    another one has left is a little too small for it. Gradients and what an optimizer makes in its step would leave
    more and more holes, that no account knows.

    Returns:
        Takes it back; None: the user has chosen it, or it is another malloc.
    """
    chosen = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # neither on macOS nor on Windows
        return None
    if chosen or not mallopt(_MMAP_THRESHOLD, _LARGE):
        return None

    def undo() -> None:
        mallopt(_MMAP_THRESHOLD, _USUAL)
        mallopt(_TRIM_THRESHOLD, 2 * _USUAL)

    return undo
