"""What stands in a checkpoint for a whole table until the file is written: shape and dtype, without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_embrace.tables.table import ShardedTable

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
    Tensor.__len__,
}


class Hole(Tensor):
    """The whole of a table's weight, or of a part of its optimizer state, before any rank has put it together.

    It can be put into dictionaries and taken out again; whoever reads values, copies or pickles it gets an error.

    Attributes:
        table: The table.
        part_Ud: This rank's columns, of all rows or of those of a sparse state.
        ids_U: Which these are, on rank 0. None: all.
        number: Which of a checkpoint's holes it is, the same on every rank.
    """

    table: ShardedTable
    part_Ud: Tensor
    ids_U: Tensor | None
    number: int

    @staticmethod
    def of(table: ShardedTable, part_Ud: Tensor, number: int, ids_U: Tensor | None = None) -> Hole:
        """A hole [V, D] for what this rank has [U, d] of."""
        hole = torch.empty(table.rows, table.columns, dtype=part_Ud.dtype, device="meta").as_subclass(Hole)
        hole.table, hole.part_Ud, hole.number, hole.ids_U = table, part_Ud, number, ids_U
        return hole

    @property
    def content(self) -> tuple[int, int]:
        """The shape of what it is filled with: [U, D]."""
        return self.part_Ud.shape[0], self.table.columns

    @property
    def content_bytes(self) -> int:
        """The bytes of that."""
        rows, columns = self.content
        return rows * columns * self.part_Ud.element_size()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Says what it is, and nothing else."""
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} was called on a table of a checkpoint that is being saved. Values"
            " are put together when the file is written: `trainer.strategy.full_state_dict()`, called on all ranks, has"
            " them now; an `on_save_checkpoint` hook or an overridden `state_dict` is given them."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Hole({self.table.name!r}, {tuple(self.shape)}, {self.dtype})"
