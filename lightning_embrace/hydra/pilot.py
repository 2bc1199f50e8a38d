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
    """Counts what autograd saves, block by block; on CUDA torch's allocator is asked as well.

    Args:
        device: Where blocks run.

    Attributes:
        activations: By block, bytes that its calls save when they run with a graph, beside what they are given.
        largest: Of one call, and of what it is given.
        computing: What one call was seen to take at most, beside the parameters' gradients; on CUDA.
        inputs: By block, bytes of what its calls are given.
        calls: By block.
        outside: What is saved outside of blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.computing = 0
        self.activations: Counter[str] = Counter()
        self.largest = 0
        self.inputs: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.outside = 0
        self._boundaries: set[int] = set()

    def working(self, stepping: int) -> int:
        """What computing takes of the device beside parameters, while one block runs backward or is stepped.

        Args:
            stepping: What a step of the optimizer takes.
        """
        waiting = self.outside + sum(self.inputs.values())
        return max(int(self.largest * (1 + _GRADIENTS)), self.computing, stepping) + waiting

    def guess(self, ratio: float) -> Pilot:
        """What a batch may take that is so much larger. It was not run: of no block it is known what could be kept."""
        guess = Pilot(self._device)
        guess.activations.update({block: int(nbytes * ratio) for block, nbytes in self.activations.items()})
        guess.inputs.update({block: int(nbytes * ratio) for block, nbytes in self.inputs.items()})
        guess.largest, guess.outside = int(self.largest * ratio), int(self.outside * ratio)
        guess.computing = int(self.computing * ratio)
        return guess

    def include(self, other: Pilot) -> None:
        """Another step was measured: what counts is the larger of both."""
        self.activations |= other.activations
        self.inputs |= other.inputs
        self.calls |= other.calls
        self.largest, self.outside = max(self.largest, other.largest), max(self.outside, other.outside)
        self.computing = max(self.computing, other.computing)

    def called(self, block: str, tensors: Iterable[Tensor]) -> None:
        """A call is on the tape."""
        self.calls[block] += 1
        for tensor in tensors:
            key = _key(tensor)
            if key not in self._boundaries:  # what several blocks share counts once
                self._boundaries.add(key)
                self.inputs[block] += tensor.untyped_storage().nbytes()

    @contextmanager
    def inside(self, block: str, known: Collection[Tensor], given: Iterable[Tensor]) -> Iterator[None]:
        """Around the second run of a block.

        Args:
            block: Its name.
            known: Its parameters, which are saved as well, and counted elsewhere.
            given: What the call is given.
        """
        inputs = {_key(t) for t in given}
        with _counting({_key(t) for t in known}) as saved, self._watching(known):
            yield
        self.activations[block] += sum(nbytes for key, nbytes in saved.items() if key not in inputs)
        self.largest = max(self.largest, sum(saved.values()))

    @contextmanager
    def _watching(self, known: Collection[Tensor]) -> Iterator[None]:
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        yield
        most = torch.cuda.max_memory_allocated(self._device) - before
        gradients = sum(t.numel() * t.element_size() for t in known if t.requires_grad)
        self.computing = max(self.computing, most - gradients)

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
