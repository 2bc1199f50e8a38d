"""The integer tensors of a batch, whatever collection they are in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

# a list this long holds samples that were not collated, and another number of them in every batch: one leaf
_LONG = 32
# what is nested deeper, or has more parts, is not the data of a batch (an object may refer to anything)
_DEEPEST, _MOST = 8, 4096


def leaves(batch: Any) -> dict[str, Tensor]:
    """Finds the int32 and int64 tensors of a batch.

    Mappings, lists, tuples, dataclasses and other objects with attributes are followed, in their own order.

    Args:
        batch: As a data loader gives it.

    Returns:
        The tensors by path, such as ``["text"].ids[0]``; a path means the same in every batch of equal structure.
        Of a long list the tensors are joined in one.
    """
    found: dict[str, Tensor] = {}
    _collect(batch, "", found, set(), 0)
    return found


def _collect(value: Any, path: str, found: dict[str, Tensor], seen: set[int], depth: int) -> None:
    if isinstance(value, Tensor):
        tensor = _as_ids(value)
        if tensor is not None:
            found[path] = tensor
        return
    if depth == _DEEPEST or id(value) in seen or len(seen) == _MOST or _has_no_parts(value):
        return
    seen.add(id(value))
    if isinstance(value, (list, tuple)) and len(value) > _LONG:
        _collect_long(value, path, found, seen, depth)
        return
    for step, part in _parts(value):
        _collect(part, path + step, found, seen, depth + 1)


def _collect_long(value: Any, path: str, found: dict[str, Tensor], seen: set[int], depth: int) -> None:
    joined: dict[str, list[Tensor]] = {}
    for part in value:
        inner: dict[str, Tensor] = {}
        _collect(part, "", inner, seen, depth + 1)
        for step, tensor in inner.items():
            joined.setdefault(step, []).append(tensor.flatten().long())
    found.update({f"{path}[*]{step}": torch.cat(tensors) for step, tensors in joined.items()})


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", value[key]) for key in value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", part) for name, part in zip(value._fields, value))
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif is_dataclass(value):
        yield from ((f".{field.name}", getattr(value, field.name, None)) for field in fields(value))
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _has_no_parts(value: Any) -> bool:
    return value is None or isinstance(value, (str, bytes, int, float, complex, type, nn.Module)) or callable(value)


def _as_ids(tensor: Tensor) -> Tensor | None:
    if tensor.dtype not in (torch.int32, torch.int64):
        return None
    if tensor.is_nested:
        return tensor.values() if tensor.layout == torch.jagged else None
    return tensor.detach() if tensor.layout == torch.strided else None
