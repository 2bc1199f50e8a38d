"""What blocks are given and return, as flat tensors and the rest."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

#: what cannot change, or not so that it matters
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, frozenset,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    FunctionType, BuiltinFunctionType, type(torch.nn.functional.relu),
)  # fmt: skip


class UnknownObject(Exception):
    """Something that may change, and could not be put back for a second run.

    Args:
        found: The object.
        path: Where it was found, such as ``"past_key_value"``.
    """

    def __init__(self, found: object, path: str) -> None:
        super().__init__(found, path)
        self.found = found
        self.path = path


@dataclass(frozen=True)
class Packed:
    """A tree without its tensors.

    Attributes:
        tensors: In the order in which they were found.
        rebuild: Puts others in their places; containers are new ones.
        outline: Equal for trees that differ in their tensors alone.
    """

    tensors: tuple[Tensor, ...]
    rebuild: Callable[[Sequence[Tensor]], Any]
    outline: object


def pack(tree: Any) -> Packed:
    """Takes the tensors out of a tree of containers, dataclasses and plain data.

    Args:
        tree: Any nesting.

    Returns:
        The tensors and what is around them.

    Raises:
        UnknownObject: There is something else in it.
    """
    tensors: list[Tensor] = []
    build, outline = _take_apart(tree, tensors, "")
    return Packed(tuple(tensors), build, outline)


def _take_apart(tree: Any, tensors: list[Tensor], path: str) -> tuple[Callable[[Sequence[Tensor]], Any], object]:
    if isinstance(tree, Tensor):
        place = len(tensors)
        tensors.append(tree)
        return (lambda given: given[place]), Tensor
    if isinstance(tree, _PLAIN):
        return (lambda given: tree), tree
    if is_dataclass(tree) and not pytree.tree_is_leaf(tree):  # registered by its library
        return _by_pytree(tree, tensors, path)
    if is_dataclass(tree):
        return _dataclass(tree, tensors, path)
    if not pytree.tree_is_leaf(tree):
        return _by_pytree(tree, tensors, path)
    raise UnknownObject(tree, path)


def _by_pytree(tree: Any, tensors: list[Tensor], path: str) -> tuple[Callable[[Sequence[Tensor]], Any], object]:
    found, spec = pytree.tree_flatten_with_path(tree)
    parts = [_take_apart(leaf, tensors, path + pytree.keystr(keys)) for keys, leaf in found]

    def build(given: Sequence[Tensor]) -> Any:
        return pytree.tree_unflatten([part(given) for part, _ in parts], spec)

    return build, (spec, tuple(outline for _, outline in parts))


def _dataclass(tree: Any, tensors: list[Tensor], path: str) -> tuple[Callable[[Sequence[Tensor]], Any], object]:
    names = [f.name for f in fields(tree)]
    parts = [_take_apart(getattr(tree, name), tensors, f"{path}.{name}") for name in names]

    def build(given: Sequence[Tensor]) -> Any:
        made = copy.copy(tree)
        for name, (part, _) in zip(names, parts):
            object.__setattr__(made, name, part(given))  # it may be frozen
        return made

    return build, (type(tree), tuple(outline for _, outline in parts))
