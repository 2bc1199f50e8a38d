"""Host memory that a CUDA device reads and writes by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def lock_pages(memory: Tensor) -> Callable[[], None]:
    """Locks the pages of host memory, as they are: torch's own pinned memory is rounded up to a power of two.

    Args:
        memory: Contiguous, on the host.

    Returns:
        Unlocks them. Call it before the memory is freed.

    Raises:
        RuntimeError: The driver refuses.
    """
    if memory.numel():
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    return partial(_unlock, memory.data_ptr() if memory.numel() else 0)


def _unlock(address: int) -> None:
    if address:
        torch.cuda.synchronize()  # copies may be on their way
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
