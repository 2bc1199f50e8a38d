"""Models that are larger than host memory, built by the user's own code."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

#: smaller parameters stay in memory
_LEAST = 1 << 20


@contextmanager
def built_on_disk(folder: Path) -> Iterator[None]:
    """Inside, large parameters that modules are given have their numbers in files, which are mapped.

    A parameter keeps its identity, and whatever initialises it afterwards writes to it as it always has: the numbers
    are those of construction in memory. What was written may leave memory whenever that is needed for something else.
    The files have no name, and each is gone with its mapping.

    Args:
        folder: Where; it is made if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        del module, name
        if parameter is None or parameter.device.type != "cpu" or parameter.is_sparse:
            return
        if parameter.numel() * parameter.element_size() >= _LEAST and parameter.is_contiguous():
            parameter.data = mapped_copy(parameter.data, folder)

    handle = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()


def mapped_copy(tensor: Tensor, folder: Path) -> Tensor:
    """The same numbers in a file that has no name and is mapped.

    Args:
        tensor: Contiguous, on the CPU.
        folder: Where the file is.
    """
    descriptor, path = tempfile.mkstemp(prefix=".hydra-", suffix=".parameter", dir=folder)
    try:
        os.posix_fallocate(descriptor, 0, tensor.numel() * tensor.element_size())  # a hole could not be filled later
        mapped = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    finally:
        os.unlink(path)
        os.close(descriptor)
    return mapped.copy_(tensor)


def into_memory(parameter: nn.Parameter) -> None:
    """Takes a parameter that stays on the device out of its file."""
    if parameter.device.type == "cpu" and parameter.untyped_storage().filename is not None:
        parameter.data = parameter.data.clone()
