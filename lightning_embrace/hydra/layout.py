"""Where tensors lie in a run of bytes."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

#: what O_DIRECT wants of addresses, offsets and lengths
PAGE = 4096
#: where a tensor may begin: as torch's own allocator has it, since kernels choose their path by alignment
_ALIGNMENT = 64


class Shape(NamedTuple):
    """All of a tensor but its numbers.

    Attributes:
        size: Its shape.
        stride: In elements; it has no holes.
        dtype: Of its elements.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype | None = None) -> Shape:
        """That of a tensor; one with holes or repetitions is laid out contiguously."""
        like = torch.empty_like(tensor, device="meta", dtype=dtype)
        return cls(tuple(like.shape), tuple(like.stride()), like.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        count = 1
        for n in self.size:
            count *= n
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class Section:
    """Tensors that are moved together, one after the other in whole pages.

    Attributes:
        shapes: The tensors.
        offsets: In bytes, where each begins.
        nbytes: Of all, in whole pages.
    """

    shapes: tuple[Shape, ...]
    offsets: tuple[int, ...]
    nbytes: int

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors in a run of bytes.

        Args:
            memory: uint8 ``[>= nbytes]``.

        Returns:
            Tensors that share its memory.
        """
        made = []
        for shape, offset in zip(self.shapes, self.offsets):
            flat = memory[offset : offset + shape.nbytes].view(shape.dtype)
            made.append(flat.as_strided(shape.size, shape.stride))
        return made


def lay_out(shapes: Iterable[Shape]) -> Section:
    """Puts tensors one after the other.

    Args:
        shapes: The tensors.

    Returns:
        The section.
    """
    shapes = tuple(shapes)
    offsets, end = [], 0
    for shape in shapes:
        offsets.append(end)
        end += -(-shape.nbytes // _ALIGNMENT) * _ALIGNMENT
    return Section(shapes, tuple(offsets), whole_pages(end))


def whole_pages(nbytes: int) -> int:
    """Rounds up."""
    return -(-nbytes // PAGE) * PAGE


def allocate(nbytes: int, device: torch.device | None = None) -> Tensor:
    """A run of bytes that begins at a page.

    On the host it is a mapping of its own, and gone when nobody has it: malloc would keep holes of its size, which no
    other aligned run fits.

    Args:
        nbytes: How many, whole pages.
        device: Where; None: the host.

    Returns:
        uint8 ``[nbytes]``, not initialised.
    """
    if device is not None and device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)  # far fewer faults where the machine has huge pages
    return torch.frombuffer(pages, dtype=torch.uint8)


def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copies tensor by tensor, without a trace in autograd."""
    with torch.no_grad():
        for source, target in zip(sources, targets):
            target.copy_(source)
