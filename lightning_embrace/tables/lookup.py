"""One look-up: unique ids, fetched rows, and the autograd functions that collect the rows' gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_embrace.tables.table import PooledRequest, ShardedTable
from lightning_embrace.tables.window import Window


class Source(Protocol):
    """Where a table's rows come from: numbered rounds in a training step, request and serve elsewhere."""

    in_training_step: bool
    in_step: bool
    step: int

    def fetch_rows(self, table: ShardedTable, ids_U: Tensor) -> Tensor:
        """Rows of unique valid ids in full width, [U, D]."""
        ...

    def fetch_pooled(self, table: ShardedTable, request: PooledRequest) -> Tensor:
        """Sums or means of bags in full width, [B, D]; only in a training step."""
        ...

    def refuse(self, table: ShardedTable, bad_id: int) -> None:
        """Raises IndexError, on every rank."""
        ...

    def changed(self, table: ShardedTable) -> None:
        """The table's weights were loaded anew."""
        ...


class TableHandle:
    """What a sharded module keeps: its table and where rows come from.

    Args:
        table: The table.
        source: Where rows come from.
    """

    def __init__(self, table: ShardedTable, source: Source) -> None:
        self.table = table
        self.source = source
        # makes autograd call the look-up's backward; the rows themselves are no part of the graph
        self._anchor = torch.zeros((), device=table.parameter.device, requires_grad=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableHandle:
        raise RuntimeError(
            f"A copy of the module that holds table {self.table.name!r} was made during training, while the table is"
            " sharded over the ranks. Copy the model before or after `fit`, or exclude the table with `tables=`."
        )

    def check_ids(self, ids: Tensor) -> None:
        """Raises IndexError on every rank when an id is outside [0, V)."""
        if ids.numel() == 0:
            return
        low, high = torch.aminmax(ids)
        if int(low) < 0 or int(high) >= self.table.rows:
            self.source.refuse(self.table, int(low) if int(low) < 0 else int(high))

    def unique_rows(self, ids: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor, int | None]:
        """Fetches the rows of some ids.

        Args:
            ids: Integer ids of any shape.
            padding_idx: An id whose row receives no gradient.

        Returns:
            The unique rows [U, D], for each id its position among them (shaped as ``ids``), and the position of
            ``padding_idx``, None where it does not occur.
        """
        self.check_ids(ids)
        ids_U, inverse = torch.unique(ids.long(), return_inverse=True)
        padding = None
        if padding_idx is not None:
            place = int(torch.searchsorted(ids_U, padding_idx))
            if place < ids_U.numel() and int(ids_U[place]) == padding_idx:
                padding = place
        if not self.source.in_training_step:
            return self.source.fetch_rows(self.table, ids_U), inverse, padding
        window = self.table.window
        missing_M = window.missing(ids_U)
        if missing_M.numel() > 0:
            window.add(missing_M, self.source.fetch_rows(self.table, missing_M))
        position_U = window.positions(ids_U)
        if self._wants_gradient():
            keep_U = None
            if padding is not None:
                keep_U = torch.ones_like(ids_U, dtype=torch.bool)
                keep_U[padding] = False
            return _take_rows(self._anchor, self.table, window, position_U, keep_U), inverse, padding
        return window.rows_UD[position_U], inverse, padding

    def pooled(self, request: PooledRequest) -> Tensor:
        """Fetches sums or means of bags, [B, D]."""
        window = self.table.window
        number = len(self.table.asked_pooled[self.table.rank])
        bags_BD = self.source.fetch_pooled(self.table, request)
        if not self._wants_gradient():
            return bags_BD
        return _collect_pooled(self._anchor, self.table, window, bags_BD, number)

    def _wants_gradient(self) -> bool:
        return torch.is_grad_enabled() and self.table.parameter.requires_grad


def _stale(table: ShardedTable, window: Window) -> None:
    if table.window is not window:
        raise RuntimeError(
            f"backward() reached a look-up in table {table.name!r} that was made before the table's optimizer last"
            " stepped. Call backward() before `optimizer.step()`, or repeat the look-up after it."
        )


class _TakeRows(torch.autograd.Function):
    """Rows of the window; in backward their gradients go back to it."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, table: ShardedTable, window: Window, position_U: Tensor, keep_U: Tensor | None
    ) -> Tensor:
        ctx.table, ctx.window, ctx.position_U, ctx.keep_U = table, window, position_U, keep_U
        return window.rows_UD.index_select(0, position_U)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_UD: Tensor) -> tuple[None, ...]:
        _stale(ctx.table, ctx.window)
        ctx.window.accumulate(ctx.position_U, grad_UD, ctx.keep_U)
        return None, None, None, None, None


class _CollectPooled(torch.autograd.Function):
    """Bags as they came; in backward their gradients go to the window."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, table: ShardedTable, window: Window, bags_BD: Tensor, number: int) -> Tensor:
        ctx.table, ctx.window, ctx.number = table, window, number
        return bags_BD.view_as(bags_BD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BD: Tensor) -> tuple[None, ...]:
        _stale(ctx.table, ctx.window)
        ctx.window.accumulate_pooled(ctx.number, grad_BD)
        return None, None, None, None, None


_take_rows: Callable[..., Tensor] = _TakeRows.apply
_collect_pooled: Callable[..., Tensor] = _CollectPooled.apply
