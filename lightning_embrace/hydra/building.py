"""Models that are larger than host memory, built by the user's own code."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from lightning_embrace.checkpoint.filling import check_disk
from lightning_embrace.hydra.nameless import Nameless, cannot_write

#: smaller parameters stay in memory
LEAST = 1 << 20
#: what may have been written to mapped files before their pages are let go
_TOUCHED = 128 << 20
#: what is copied at a time
_PIECE = 1 << 24
_LIBC = ctypes.CDLL(None)


@contextmanager
def built_on_disk(folder: Path) -> Iterator[None]:
    """Inside, large parameters that modules are given have their numbers in files, which are mapped.

    A parameter keeps its identity, and whatever initialises it afterwards writes to it as it always has: the numbers
    are those of construction in memory. What was written leaves this process' memory soon afterwards, and the machine's
    whenever that is needed for something else. The files have no name, and each is gone with its mapping.

    Args:
        folder: Where; it is made if it is missing.
    """
    pages = _Pages(folder)

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        del module, name
        if parameter is None:
            return
        with torch._C.DisableTorchFunction():  # what is done here is nothing of the user's
            if _is_large(parameter) and not is_mapped(parameter):
                parameter.data = mapped_copy(parameter.data, folder)
            if is_mapped(parameter):
                pages.add(parameter)

    handle = register_module_parameter_registration_hook(move)
    try:
        with pages:
            yield
    finally:
        handle.remove()
        pages.let_go()


class _Pages(TorchFunctionMode):
    """Inside, pages of mapped parameters are let go once so much was written: they would count as this process' memory.

    They stay in the page cache, from which the machine takes memory when it is needed. What ``torch.empty`` makes is in
    a file from the beginning.

    Args:
        folder: Where files are.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._mapped: dict[int, weakref.ref[nn.Parameter]] = {}  # by address
        self._touched: set[int] = set()
        self._nbytes = 0

    def add(self, parameter: nn.Parameter) -> None:
        """Takes note of a parameter that is mapped now."""
        self._mapped[parameter.data_ptr()] = weakref.ref(parameter)

    def let_go(self) -> None:
        """Lets pages go. Of what is mapped for all to see, nothing is lost thereby."""
        for address in self._touched:
            parameter = self._mapped[address]()
            # the user may have given it other memory meanwhile, whose pages would be lost
            if parameter is not None and parameter.data_ptr() == address and is_mapped(parameter):
                let_pages_go(parameter)
        self._touched.clear()
        self._nbytes = 0

    def _touch(self, tensor: Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address in self._mapped:
            self._touched.add(address)
            self._nbytes += tensor.nbytes
            if self._nbytes >= _TOUCHED:
                self.let_go()

    @staticmethod
    def _on_cpu(device: Any = None, requires_grad: bool = False, out: Any = None, **_: Any) -> bool:
        wanted = torch.get_default_device() if device is None else torch.device(device)
        return wanted.type == "cpu" and not requires_grad and out is None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Counts what functions are given first: what they write, if they write."""
        if func is torch.empty and self._on_cpu(**(kwargs or {})):
            made = torch.empty(*args, **{**(kwargs or {}), "device": "meta"})
            if made.nbytes >= LEAST and made.is_contiguous():
                return mapped_like(made, self._folder)
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "__get__":  # of an attribute
            given = next(iter((*args, *(kwargs or {}).values())), None)
            if isinstance(given, Tensor) and given.device.type == "cpu" and not given.is_sparse:
                self._touch(given)
        return result


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor's memory is a file that is mapped."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None


def let_pages_go(tensor: Tensor) -> None:
    """Takes the pages of a file that is mapped for all to see out of this process' memory.

    Args:
        tensor: The whole file.
    """
    _LIBC.madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), mmap.MADV_DONTNEED)


def mapped_like(tensor: Tensor, folder: Path) -> Tensor:
    """Zeros in a file that has no name and is mapped, of a tensor's shape and dtype.

    Args:
        tensor: Contiguous.
        folder: Where the file is.
    """
    return _mapped(tensor, folder, lambda descriptor: None)


def mapped_copy(tensor: Tensor, folder: Path) -> Tensor:
    """The same numbers in a file that has no name and is mapped.

    Args:
        tensor: Contiguous, on the CPU.
        folder: Where the file is.
    """
    return _mapped(tensor, folder, partial(_write, tensor.detach().view(-1).view(torch.uint8)))


def _mapped(like: Tensor, folder: Path, fill: Callable[[int], None]) -> Tensor:
    try:
        file = Nameless(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        check_disk(file.descriptor, like.nbytes, f"HydraStrategy(disk={str(folder)!r})")
        os.posix_fallocate(file.descriptor, 0, like.nbytes)  # a hole could not be filled later
        fill(file.descriptor)
        return torch.from_file(file.path, shared=True, size=like.numel(), dtype=like.dtype).view(like.shape)
    finally:
        file.close()


def _write(given: Tensor, descriptor: int) -> None:
    """By calls: pages that are written where they are mapped take a fault each."""
    values, done = given.numpy().data, 0
    while done < len(values):
        done += os.pwrite(descriptor, values[done : done + _PIECE], done)


def _is_large(tensor: Tensor) -> bool:
    dense = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return dense and tensor.nbytes >= LEAST and tensor.is_contiguous()


def into_memory(parameter: nn.Parameter) -> None:
    """Takes a parameter that stays on the device out of its file."""
    if is_mapped(parameter):
        parameter.data = parameter.data.clone()
