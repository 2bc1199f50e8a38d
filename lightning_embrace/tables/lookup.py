"""One look-up: unique ids, fetched rows, and the autograd functions that collect the rows' gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_embrace.tables.headers import Act
from lightning_embrace.tables.request import PooledRequest
from lightning_embrace.tables.table import ShardedTable
from lightning_embrace.tables.window import Window


class Source(Protocol):
    """Where a table's rows come from: numbered rounds in a training step, request and serve elsewhere."""

    in_training_step: bool
    in_backward: bool
    in_step: bool

    def fetch_rows(self, table: ShardedTable, ids_U: Tensor) -> Tensor:
        """Rows of unique valid ids in full width, [U, D]."""
        ...

    def fetch_nothing(self, table: ShardedTable) -> None:
        """Answers the others, where a look-up needs nothing of them; only in a training step."""
        ...

    def fetch_pooled(self, table: ShardedTable, request: PooledRequest) -> Tensor:
        """Sums or means of bags in full width, [B, D]; only in a training step."""
        ...

    def refuse(self, table: ShardedTable, bad_id: int) -> None:
        """Raises IndexError, on every rank."""
        ...

    def agree(self, act: Act, words: Sequence[int]) -> list[list[int]]:
        """Tells every rank some words, and returns every rank's. Collective."""
        ...

    def changing(self, table: ShardedTable) -> AbstractContextManager[None]:
        """The table's weights are loaded anew inside."""
        ...

    def shown(self, table: ShardedTable) -> Tensor:
        """What a state dict holds for the table."""
        ...

    def check_alive(self, table: ShardedTable) -> None:
        """Raises when training has ended with an exception and left the table sharded."""
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

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Copies and pickles of the module come by here."""
        raise RuntimeError(
            f"A copy or pickle of the module that holds table {self.table.name!r} was made while the table is sharded"
            " over the ranks: during training, and after it too if it was built in `configure_model`. Copy the model"
            " before or after `fit`, save with `trainer.save_checkpoint`, or keep the table whole:"
            f" EmbRaceStrategy(tables=['*', '!{self.table.name}'])."
        )

    def check_ids(self, ids: Tensor) -> None:
        """Raises as torch does when ids are no ids, and IndexError on every rank when one is outside [0, V)."""
        if ids.dtype not in (torch.int32, torch.int64):
            raise RuntimeError(
                f"The ids of a look-up in table {self.table.name!r} must be int32 or int64, but got {ids.dtype}. Write"
                " `ids.long()`."
            )
        if ids.numel() == 0:
            return
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= self.table.rows:
            self.source.refuse(self.table, low if low < 0 else high)

    def count(self, looked_up: int, unique: int) -> None:
        """Notes how many ids a look-up was given, and how many different ones."""
        if self.source.in_training_step and not self.source.in_backward:
            self.table.looked_up += looked_up
            self.table.unique += unique

    def rows(self, ids_U: Tensor, padding: int | None = None) -> Tensor:
        """Fetches rows.

        Args:
            ids_U: Unique, valid int64 ids.
            padding: Position of the id whose row receives no gradient.

        Returns:
            The rows [U, D]; their gradient goes to the owners.
        """
        if not self.source.in_training_step:
            rows_UD = self.source.fetch_rows(self.table, ids_U)
            return _refuse_backward(self._anchor, self.table, rows_UD) if self.wants_gradient() else rows_UD
        window = self.table.window
        if self.table.noted is not None:
            self.table.noted.append(ids_U)
        missing_M = window.missing(ids_U)
        if missing_M.numel() > 0:
            window.add(missing_M, self.source.fetch_rows(self.table, missing_M))
        elif not self.source.in_backward:
            self.source.fetch_nothing(self.table)
        position_U = window.positions(ids_U)
        if not self.wants_gradient():
            return window.rows_UD[position_U]
        keep_U = None
        if padding is not None:
            keep_U = torch.ones_like(ids_U, dtype=torch.bool)
            keep_U[padding] = False
        return _take_rows(self._anchor, self.table, window, position_U, keep_U)

    def pooled(self, request: PooledRequest) -> Tensor:
        """Fetches sums or means of bags, [B, D]."""
        window = self.table.window
        if self.table.noted is not None:
            self.table.noted.append(request.ids_L)
        number = len(self.table.asked_pooled[self.table.rank])
        bags_BD = self.source.fetch_pooled(self.table, request)
        window.bags.append((request, bags_BD))
        return self._collect(number)

    def pooled_before(self, request: PooledRequest) -> Tensor | None:
        """Sums or means that this window has fetched already: of equal bags, or of a look-up that backward repeats."""
        for number, (earlier, _) in enumerate(self.table.window.bags):
            if earlier.same_as(request):
                if not self.source.in_backward:
                    self.source.fetch_nothing(self.table)
                return self._collect(number)
        return None

    def wants_gradient(self) -> bool:
        """Whether torch would record a look-up here."""
        return torch.is_grad_enabled() and self.table.parameter.requires_grad

    def _collect(self, number: int) -> Tensor:
        window = self.table.window
        bags_BD = window.bags[number][1]
        if not self.wants_gradient():
            return bags_BD.clone()
        return _collect_pooled(self._anchor, self.table, window, bags_BD, number)


def _stale(table: ShardedTable, window: Window) -> None:
    if table.window is not window:
        raise RuntimeError(
            f"backward() reached a look-up in table {table.name!r} that was made before the table's optimizer last"
            " stepped. Call backward() before `optimizer.step()`, or repeat the look-up after it."
        )


def _collected(ctx: Any) -> None:
    """A look-up's gradient is there; `backward(retain_graph=True)` comes by more than once."""
    if not getattr(ctx, "came", False):
        ctx.came = True
        ctx.window.waiting -= 1
    ctx.table.collected()


class _TakeRows(torch.autograd.Function):
    """Rows of the window; in backward their gradients go back to it."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, table: ShardedTable, window: Window, position_U: Tensor, keep_U: Tensor | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.table, ctx.window, ctx.position_U, ctx.keep_U = table, window, position_U, keep_U
        window.waiting += 1
        return window.rows_UD.index_select(0, position_U)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_UD: Tensor | None) -> tuple[None, ...]:
        _stale(ctx.table, ctx.window)
        ctx.table.reached()
        if grad_UD is not None:  # undefined: nothing reached the rows, as if they had not been looked up
            ctx.window.accumulate(ctx.position_U, grad_UD, ctx.keep_U)
        _collected(ctx)
        return None, None, None, None, None


class _CollectPooled(torch.autograd.Function):
    """Bags as they came; in backward their gradients go to the window."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, table: ShardedTable, window: Window, bags_BD: Tensor, number: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.table, ctx.window, ctx.number = table, window, number
        window.waiting += 1
        return bags_BD.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BD: Tensor | None) -> tuple[None, ...]:
        _stale(ctx.table, ctx.window)
        ctx.table.reached()
        if grad_BD is not None:
            ctx.window.accumulate_pooled(ctx.number, grad_BD)
        _collected(ctx)
        return None, None, None, None, None


class _RefuseBackward(torch.autograd.Function):
    """Rows looked up outside a training step: they require a gradient as torch has it, but none can travel."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, table: ShardedTable, rows_UD: Tensor) -> Tensor:
        ctx.table = table
        return rows_UD.view_as(rows_UD)

    @staticmethod
    def backward(ctx: Any, grad_UD: Tensor) -> tuple[None, ...]:
        raise RuntimeError(
            f"backward() reached a look-up in table {ctx.table.name!r} that was made outside `training_step`, where the"
            " ranks exchange no gradients. Make the look-up in `training_step`, detach its result, or keep the table"
            f" whole: EmbRaceStrategy(tables=['*', '!{ctx.table.name}'])."
        )


_take_rows: Callable[..., Tensor] = _TakeRows.apply
_collect_pooled: Callable[..., Tensor] = _CollectPooled.apply
_refuse_backward: Callable[..., Tensor] = _RefuseBackward.apply
