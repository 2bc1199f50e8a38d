"""Checkpoint files that are mapped instead of read: what is larger than memory stays in the file until it is cut."""

from __future__ import annotations

import copy
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

#: Linux' numbers, which not every Python knows
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_PAGEOUT = getattr(mmap, "MADV_PAGEOUT", 21)


class MappedFile:
    """A file of which pages are in memory while they are needed. What is written to them does not reach it.

    torch maps files so that the kernel counts all of it as memory that may be needed, and refuses what is more than it
    has. This is not counted.

    Args:
        path: The file, not empty.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            flags, access = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self._map = mmap.mmap(file.fileno(), 0, flags=flags, prot=access)
        self.storage = torch.frombuffer(self._map, dtype=torch.uint8).untyped_storage()

    def let_go(self, tensor: Tensor) -> None:
        """Takes a tensor's pages out of memory, where the kernel can; they are read again if they are needed."""
        if tensor.is_meta or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        start = tensor.data_ptr() - self.storage.data_ptr()
        if 0 <= start < self.storage.nbytes():
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            with suppress(OSError):
                self._map.madvise(_PAGEOUT, first, start + tensor.nbytes - first)


def load_mapped(
    path: str, stays: Callable[[Tensor], bool], weights_only: bool | None
) -> tuple[dict[str, Any], MappedFile]:
    """Loads a checkpoint of Lightning's without reading what may be larger than memory.

    Args:
        path: The file.
        stays: Says of a weight or an optimizer state whether it stays in the file until it is read. Nothing may keep
            such a one: the file may be written anew.
        weights_only: As in ``torch.load``.

    Returns:
        What was saved, and the file.
    """
    file = MappedFile(path)
    with _mapping(path, file):
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    content = {
        key: unmapped(value, stays if key in ("state_dict", "optimizer_states") else None)
        for key, value in checkpoint.items()
    }
    return content, file


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


@contextmanager
def _mapping(path: str, file: MappedFile) -> Iterator[None]:
    """Inside, ``torch.load`` takes this mapping of a file instead of making its own."""
    map_file = torch.UntypedStorage.from_file

    def from_file(name: Any, *arguments: Any, **options: Any) -> Any:
        return file.storage if name == os.fspath(path) else map_file(name, *arguments, **options)

    torch.UntypedStorage.from_file = from_file  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del torch.UntypedStorage.from_file  # what it has inherited shows again
