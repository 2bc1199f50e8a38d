"""What stands in a checkpoint for a large tensor until the file is written: shape and dtype, without values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

#: what may be asked of a hole: nothing that needs values
_KNOWN = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.nbytes.__get__,  # type: ignore[attr-defined]
    Tensor.is_quantized.__get__,  # type: ignore[attr-defined]
    Tensor.is_sparse.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_pinned,
    Tensor.__len__,
}


_DEVICE = Tensor.device.__get__
#: what changes its first argument, beside what ends in ``_``
_CHANGING = {"__setitem__", "__delitem__", "__set__"} | {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
}


class Hole(Tensor):
    """A tensor of a checkpoint before its values are there: those of a sharded table, or those that wait in a store.

    It can be put into dictionaries and taken out again. Whoever asks for values gets a copy of them, if they can be
    read here and now, and an error if not; whoever changes it gets an error.

    Attributes:
        number: Which of a checkpoint's holes it is, the same on every rank; equal ones are one tensor.
        content: The shape of what it is filled with.
        content_stride: How that lies in memory, in elements.
        ids_U: Of a sparse state, the rows that it has, on rank 0. None: all.
        stands_for: For people.
        cure: Where the values are now, for whoever asks.
        read: Gives some of its rows, from one on so many. None: nobody does.
    """

    number: int
    content: tuple[int, ...]
    content_stride: tuple[int, ...]
    ids_U: Tensor | None
    stands_for: str
    cure: str
    read: Callable[[int, int], Tensor] | None = None

    @staticmethod
    def of(
        stands_for: str,
        cure: str,
        number: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        stride: Sequence[int] | None = None,
        ids_U: Tensor | None = None,
    ) -> Hole:
        """A hole of some shape; ``stride`` may be given for one that is not contiguous."""
        content = tuple(shape) if ids_U is None else (len(ids_U), *shape[1:])
        hole = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Hole)
        hole.stands_for, hole.cure, hole.number, hole.ids_U = stands_for, cure, number, ids_U
        hole.content = content
        hole.content_stride = tuple(stride) if stride else tuple(torch.empty(content, device="meta").stride())
        return hole

    @property
    def content_bytes(self) -> int:
        """The bytes of what it is filled with."""
        return math.prod(self.content) * self.element_size()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Says what it is; for the rest it is read."""
        kwargs = kwargs or {}
        if func == _DEVICE and args[0].read is not None:
            return torch.device("cpu")
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if _changes(func, args, kwargs):
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} would change {args[:1]!r}, a tensor of a checkpoint that is being"
                " saved. Put a new one in its place."
            )
        return func(*map(_values, args), **{key: _values(value) for key, value in kwargs.items()})

    def values_now(self) -> Tensor:
        """A copy of its values.

        Raises:
            RuntimeError: They are put together when the file is written.
        """
        if self.read is None:
            raise RuntimeError(
                f"{self!r}, a tensor of a checkpoint that is being saved, was to be read. Values are put together when"
                f" the file is written: {self.cure}"
            )
        return self.read(0, len(self) if self.ndim else 1)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Hole({self.stands_for!r}, {tuple(self.shape)}, {self.dtype})"


def _values(value: Any) -> Any:
    if isinstance(value, Hole):
        return value.values_now()
    return type(value)(map(_values, value)) if type(value) in (list, tuple) else value


def _changes(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name in _CHANGING or (name.endswith("_") and not name.endswith("__"))
    return (in_place and bool(args) and isinstance(args[0], Hole)) or isinstance(kwargs.get("out"), Hole)
