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

    def pieces(self, transfer: Transfer) -> Iterator[Tensor]:
        """Its bytes, as they lie in memory.

        Args:
            transfer: What moves shards: it has written by then whatever it was asked to write before.

        Returns:
            uint8, in host memory; each piece is there until the next one is asked for.
        """
        start = self.unit.section(self.section).offsets[self.number]
        stop = start + self.shape.nbytes
        first, last = start // PAGE * PAGE, whole_pages(stop)
        with torch.inference_mode(False):  # where somebody looks during validation
            buffer = allocate(min(_PIECE, last - first))
        for begin in range(first, last, _PIECE):
            memory = buffer[: last - begin]
            transfer.wait_for(partial(self.unit.read, self.section, memory, begin))
            yield memory[max(0, start - begin) : stop - begin]

    def read(self, transfer: Transfer) -> Tensor:
        """A copy in host memory."""
        size, stride, dtype = self.shape
        with torch.inference_mode(False):
            made = torch.empty_strided(size, stride, dtype=dtype)
            flat = made.as_strided((made.numel(),), (1,)).view(torch.uint8)
        done = 0
        for piece in self.pieces(transfer):
            flat[done : done + piece.numel()].copy_(piece)
            done += piece.numel()
        return made
