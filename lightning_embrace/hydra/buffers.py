"""Buffers that a block changes, put back for its second run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


class Buffers:
    """A block's buffers, each with a copy of its value, so that the value before a change is known afterwards.

    torch counts changes (``_version``), but not those of batch norm's running statistics: where one buffer of a module
    has changed, all of that module count as changed.

    Args:
        block: The block.
    """

    def __init__(self, block: nn.Module) -> None:
        self._owners = [m for m in block.modules() if any(b is not None for b in m._buffers.values())]
        self._copies: dict[int, dict[str, Tensor]] = {}
        self._seen: dict[int, dict[str, tuple[Tensor, int]]] = {}

    @property
    def nbytes(self) -> int:
        """Of the copies."""
        return sum(t.numel() * t.element_size() for copies in self._copies.values() for t in copies.values())

    def before(self) -> None:
        """Call before the block runs."""
        for index, owner in enumerate(self._owners):
            if not _same(self._seen.get(index), _marks(owner)):
                self._keep(index, owner)

    def after(self) -> dict[int, dict[str, Tensor]]:
        """Call when it has run.

        Returns:
            By module, the values that its buffers had before; only of modules that have changed theirs.
        """
        changed = {}
        for index, owner in enumerate(self._owners):
            if not _same(self._seen[index], _marks(owner)):
                changed[index] = self._copies[index]
                self._keep(index, owner)
        return changed

    @contextmanager
    def as_before(self, values: Mapping[int, Mapping[str, Tensor]]) -> Iterator[None]:
        """Inside, buffers have these values; afterwards they are again what they are now, untouched."""
        now = {index: dict(self._owners[index]._buffers) for index in values}
        for index, named in values.items():
            self._owners[index]._buffers.update({name: value.clone() for name, value in named.items()})
        try:
            yield
        finally:
            for index, buffers in now.items():
                self._owners[index]._buffers.update(buffers)

    def _keep(self, index: int, owner: nn.Module) -> None:
        self._copies[index] = {n: b.detach().clone() for n, b in owner._buffers.items() if b is not None}
        self._seen[index] = _marks(owner)


def _marks(module: nn.Module) -> dict[str, tuple[Tensor, int]]:
    return {n: (b, b._version) for n, b in module._buffers.items() if b is not None}


def _same(left: dict[str, tuple[Tensor, int]] | None, right: dict[str, tuple[Tensor, int]]) -> bool:
    if left is None or left.keys() != right.keys():
        return False
    return all(left[n][0] is right[n][0] and left[n][1] == right[n][1] for n in right)
