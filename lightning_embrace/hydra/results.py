"""What a block returns, as others may keep it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

#: by so much of their size may sums of two equal runs differ, in elements' precision
_NOISE = 8.0


def own_memory(tree: Any, parameters: Iterable[Tensor]) -> Any:
    """Copies what lies in the memory of parameters, which others will have soon."""
    theirs = {_storage(p) for p in parameters}
    if not any(isinstance(t, Tensor) and _storage(t) in theirs for t in pytree.tree_leaves(tree)):
        return tree
    return pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) and _storage(t) in theirs else t, tree)


def outside_of_graphs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What a node of the graph may return: detached.

    Those that lie in the same memory are views, since a change of one would change another, and the graph would not
    know: torch refuses changes of views that a node returns.
    """
    count = Counter(_storage(t) for t in tensors)
    detached = (t.detach() for t in tensors)
    return [d.view_as(d) if _storage(d) is not None and count[_storage(d)] > 1 else d for d in detached]


def sums(tensors: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Of each tensor a number by which it is known again, and by how much that may differ."""
    return [_sum(t.detach()) for t in tensors]


def same_sums(left: Sequence[tuple[float, float]], right: Sequence[tuple[float, float]]) -> bool:
    """Whether they are of equal tensors, as far as sums can tell."""
    return len(left) == len(right) and all(
        a == b or (a != a and b != b) or abs(a - b) <= noise * abs(a) for (a, noise), (b, _) in zip(left, right)
    )


def _sum(tensor: Tensor) -> tuple[float, float]:
    if tensor.layout != torch.strided or not tensor.numel():
        return 0.0, 0.0
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return float(tensor.sum(dtype=torch.int64)), 0.0
    noise = _NOISE * torch.finfo(tensor.dtype).eps / tensor.numel() ** 0.5
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # there are no sums of these
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor, 1, dtype=wide)), noise


def _storage(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else None
