"""Whether a batch may take more than those that were measured."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree


class Growth(NamedTuple):
    """By how much a batch is larger than all before; 1 and more.

    Attributes:
        nbytes: Of all its tensors together.
        side: Of the one side of a tensor that has grown most.
    """

    nbytes: float
    side: float


class Shapes:
    """The largest tensors that batches have had, by their places in the batch.

    Bytes alone do not tell what computing takes: of as many tokens in fewer, longer sequences attention keeps more.
    """

    def __init__(self) -> None:
        self._sides: dict[str, tuple[int, ...]] = {}
        self._numbers: dict[str, int] = {}
        self._nbytes = 0

    def add(self, batch: Any) -> Growth | None:
        """Notes a batch.

        Args:
            batch: Tensors in containers; what else is there does not count.

        Returns:
            None: no tensor has a side or a size that is larger than any before in its place, nor are they larger
            together.
        """
        tensors = {
            pytree.keystr(path): leaf
            for path, leaf in pytree.tree_flatten_with_path(batch)[0]
            if isinstance(leaf, torch.Tensor)
        }
        nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
        side, larger = 1.0, nbytes > self._nbytes
        growth = nbytes / max(1, self._nbytes)
        for place, tensor in tensors.items():
            before = self._sides.get(place, ())
            if len(before) != tensor.dim():
                larger, before = True, tuple(tensor.shape)
            larger |= tensor.numel() > self._numbers.get(place, 0)
            side = max([side, *(now / max(1, most) for now, most in zip(tensor.shape, before))])
            self._sides[place] = tuple(map(max, tensor.shape, before))
            self._numbers[place] = max(tensor.numel(), self._numbers.get(place, 0))
        self._nbytes = max(nbytes, self._nbytes)
        return Growth(max(1.0, growth), side) if larger or side > 1 else None
