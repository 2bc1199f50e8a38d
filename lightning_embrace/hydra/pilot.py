"""What the first step takes, measured while it runs: nothing of the user's runs an extra time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: beside what is saved for backward, gradients of the largest of it are there
_GRADIENTS = 0.5


class Pilot:
    """Counts what autograd saves, block by block.

    Attributes:
        activations: By block, bytes that its calls save when they run with a graph.
        largest: Of one call.
        inputs: By block, bytes of what its calls are given.
        calls: By block.
        outside: What is saved outside of blocks.
    """

    def __init__(self) -> None:
        self.activations: Counter[str] = Counter()
        self.largest = 0
        self.inputs: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.outside = 0
        self._boundaries: set[int] = set()

    @property
    def working(self) -> int:
        """What computing takes of the device beside parameters."""
        return int(self.largest * (1 + _GRADIENTS)) + self.outside

    def scale(self, ratio: float) -> None:
        """A batch is so much larger than what was measured."""
        if ratio > 1:
            for counter in (self.activations, self.inputs):
                for block in counter:
                    counter[block] = int(counter[block] * ratio)
            self.largest, self.outside = int(self.largest * ratio), int(self.outside * ratio)

    def called(self, block: str, tensors: Iterable[Tensor]) -> None:
        """A call is on the tape."""
        self.calls[block] += 1
        for tensor in tensors:
            key = _key(tensor)
            if key not in self._boundaries:  # what several blocks share counts once
                self._boundaries.add(key)
                self.inputs[block] += tensor.untyped_storage().nbytes()

    @contextmanager
    def inside(self, block: str, known: Collection[Tensor]) -> Iterator[None]:
        """Around the second run of a block.

        Args:
            block: Its name.
            known: Its parameters, which are saved as well, and counted elsewhere.
        """
        with _counting({_key(t) for t in known}) as saved:
            yield
        nbytes = sum(saved.values())
        self.activations[block] += nbytes
        self.largest = max(self.largest, nbytes)

    @contextmanager
    def around(self, known: Collection[Tensor]) -> Iterator[None]:
        """Around a training step's forward.

        Args:
            known: Parameters outside of blocks.
        """
        with _counting({_key(t) for t in known}) as saved:
            yield
        self.outside = sum(nbytes for key, nbytes in saved.items() if key not in self._boundaries)


@contextmanager
def _counting(known: set[int]) -> Iterator[dict[int, int]]:
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        key = _key(tensor)
        if key not in known:
            saved[key] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _key(tensor: Tensor) -> int:
    return 0 if tensor.is_sparse else tensor.untyped_storage().data_ptr()
