"""How much memory operations take at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Inside, adds up the bytes of tensors that are made, for as long as they live.

    Args:
        least: Smaller ones do not count.

    Attributes:
        now: Bytes at this moment.
        peak: The most at any.
    """

    def __init__(self, least: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._least = least
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Sees every operation, with what it is given and what it returns."""
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._known:  # others have made it
                self._know(storage, 0)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known and storage.nbytes() >= self._least:
            self._know(storage, storage.nbytes())

    def _know(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self._known.add(storage._cdata)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, storage._cdata, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    leaves = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return [leaf.untyped_storage() for leaf in leaves if leaf.layout == torch.strided]
