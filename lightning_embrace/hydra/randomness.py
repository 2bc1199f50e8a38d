"""Random numbers of a block's forward, drawn again in backward."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class Randomness:
    """The states of all generators at one moment: torch's on CPU and device, Python's, NumPy's, and a module's own.

    Args:
        device: The device on which blocks run.
        generators: Torch generators that the block holds.
    """

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator] = ()) -> None:
        self._generators = [torch.default_generator, *generators]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._torch = [g.get_state() for g in self._generators]
        self._python: Any = random.getstate()
        self._numpy = _numpy_state()

    def keep_what_moved(self) -> bool:
        """Forgets the generators that have not drawn since.

        Returns:
            Whether any has drawn.
        """
        drawn = [not torch.equal(g.get_state(), before) for g, before in zip(self._generators, self._torch)]
        self._generators = [g for g, moved in zip(self._generators, drawn) if moved]
        self._torch = [s for s, moved in zip(self._torch, drawn) if moved]
        if self._python == random.getstate():
            self._python = None
        if _same(self._numpy, _numpy_state()):
            self._numpy = None
        return bool(self._torch) or self._python is not None or self._numpy is not None

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, numbers are drawn as after that moment; afterwards the generators go on where they were."""
        now = [g.get_state() for g in self._generators]
        python, numpy = random.getstate(), _numpy_state()
        self._set(self._torch, self._python, self._numpy)
        try:
            yield
        finally:
            self._set(now, python if self._python is not None else None, numpy if self._numpy is not None else None)

    def _set(self, states: list[torch.Tensor], python: Any, numpy: Any) -> None:
        for generator, state in zip(self._generators, states):
            generator.set_state(state)
        if python is not None:
            random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _same(left: Any, right: Any) -> bool:
    if left is None or right is None:
        return left is right
    return bool(left[2:] == right[2:] and (left[1] == right[1]).all())
