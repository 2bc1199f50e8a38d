"""A tensor that is in the store: where it is, and how it is read without the rest of its unit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_embrace.hydra.layout import PAGE, Shape, allocate, whole_pages
from lightning_embrace.hydra.transfer import Transfer
from lightning_embrace.hydra.unit import SectionName, Unit

#: what is read at a time
_PIECE = 8 << 20


class Stored(NamedTuple):
    """A parameter of a unit that is in the store, or what the optimizer keeps for one.

    Attributes:
        unit: Whose it is.
        section: Weights or states.
        number: Which of its tensors.
    """

    unit: Unit
    section: SectionName
    number: int

    @property
    def shape(self) -> Shape:
        """All of it but its numbers."""
        return self.unit.section(self.section).shapes[self.number]

    def pieces(self, transfer: Transfer, begin: int = 0, end: int | None = None) -> Iterator[Tensor]:
        """Its bytes, as they lie in memory.

        Args:
            transfer: What moves shards: it has written by then whatever it was asked to write before.
            begin: The first byte.
            end: The one behind the last; None: all that follow.

        Returns:
            uint8, in host memory; each piece is there until the next one is asked for.
        """
        offset = self.unit.section(self.section).offsets[self.number]
        start, stop = offset + begin, offset + (self.shape.nbytes if end is None else end)
        first, last = start // PAGE * PAGE, whole_pages(stop)
        with torch.inference_mode(False):  # where somebody looks during validation
            buffer = allocate(min(_PIECE, last - first))
        for at in range(first, last, _PIECE):
            memory = buffer[: last - at]
            transfer.wait_for(partial(self.unit.read, self.section, memory, at))
            yield memory[max(0, start - at) : stop - at]

    def read(self, transfer: Transfer) -> Tensor:
        """A copy in host memory."""
        size, stride, dtype = self.shape
        with torch.inference_mode(False):
            made = torch.empty_strided(size, stride, dtype=dtype)
        return self._fill(made, transfer, 0)

    def read_rows(self, transfer: Transfer, start: int, rows: int) -> Tensor:
        """A copy of some rows, contiguous; of a tensor of one number, that."""
        size, stride, dtype = self.shape
        if len(size) == 0 or stride != torch.empty(size, device="meta").stride():
            return self.read(transfer)[start : start + rows].contiguous() if size else self.read(transfer)
        with torch.inference_mode(False):
            made = torch.empty((rows, *size[1:]), dtype=dtype)
        return self._fill(made, transfer, start * stride[0] * dtype.itemsize)

    def _fill(self, made: Tensor, transfer: Transfer, begin: int) -> Tensor:
        flat = made.as_strided((made.numel(),), (1,)).view(torch.uint8)
        done = 0
        for piece in self.pieces(transfer, begin, begin + flat.numel()):
            flat[done : done + piece.numel()].copy_(piece)
            done += piece.numel()
        return made
