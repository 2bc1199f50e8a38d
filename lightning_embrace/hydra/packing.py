"""Tensors into an extent, without a second copy of all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_embrace.hydra.layout import Section, Shape, allocate
from lightning_embrace.hydra.plan import PACKING
from lightning_embrace.hydra.store import Extent


def write_packed(
    tensors: Mapping[int, Tensor], section: Section, extent: Extent, keep: bool, device: torch.device
) -> None:
    """Writes some of a section's tensors to where the section is, piece by piece.

    Args:
        tensors: By their places in the section.
        section: Of ``extent``.
        extent: Where to.
        keep: What lies between them is there already, and stays.
        device: On which the tensors are.
    """
    flat = {place: _bytes_of(tensor, section.shapes[place]) for place, tensor in tensors.items()}
    buffer = allocate(min(PACKING, section.nbytes), device)
    for begin in range(0, section.nbytes, PACKING):
        piece = buffer[: section.nbytes - begin]
        if keep:
            extent.read(piece, begin)
        for place, values in flat.items():
            start = section.offsets[place] - begin
            low, high = max(0, start), min(piece.numel(), start + values.numel())
            if low < high:
                piece[low:high].copy_(values[low - start : high - start])
        extent.write(piece, begin)


def _bytes_of(tensor: Tensor, shape: Shape) -> Tensor:
    """A tensor's bytes, as they lie in memory if it is laid out as a section has it."""
    if tensor.dtype != shape.dtype or tuple(tensor.stride()) != shape.stride:
        like = torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device=tensor.device)
        tensor = like.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)
