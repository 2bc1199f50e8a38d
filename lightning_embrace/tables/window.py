"""The rows that this rank has fetched since the table last changed, and the gradient that they collect."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_embrace.tables.request import PooledRequest


class Window:
    """Unique rows in the order they were fetched, in full width D.

    A row is fetched once however often it is looked up, by any look-up of the step or, under gradient accumulation, of
    the whole accumulation window. ``touched`` tells the rows that received a gradient from those that were only read,
    because a row-sparse optimizer moves the former alone.

    Args:
        rows_UD: The first rows, usually none.
    """

    def __init__(self, rows_UD: Tensor) -> None:
        self.rows_UD = rows_UD
        self._sorted_ids_U = torch.empty(0, dtype=torch.int64, device=rows_UD.device)
        self._position_U = torch.empty(0, dtype=torch.int64, device=rows_UD.device)
        self._grad_UD: Tensor | None = None
        self._touched_U: Tensor | None = None
        self._pooled_grads: dict[int, Tensor] = {}
        #: pooled requests and their answers: activation checkpointing asks again in backward
        self.bags: list[tuple[PooledRequest, Tensor]] = []

    def __len__(self) -> int:
        return self.rows_UD.shape[0]

    def missing(self, ids_U: Tensor) -> Tensor:
        """Those of some unique ids that have not been fetched yet."""
        if len(self) == 0:
            return ids_U
        return ids_U[~self._found(ids_U)[0]]

    def positions(self, ids_U: Tensor) -> Tensor:
        """Where fetched ids stand in ``rows_UD``."""
        found_U, place_U = self._found(ids_U)
        assert bool(found_U.all()), "a row was looked up before it was fetched"
        return self._position_U[place_U]

    def add(self, ids_U: Tensor, rows_UD: Tensor) -> None:
        """Appends rows that were missing."""
        start = len(self)
        self.rows_UD = rows_UD if start == 0 else torch.cat([self.rows_UD, rows_UD])
        ids = torch.cat([self._sorted_ids_U, ids_U])
        positions = torch.cat([self._position_U, torch.arange(start, len(self), device=ids_U.device)])
        self._sorted_ids_U, order = ids.sort()
        self._position_U = positions[order]

    def accumulate(self, position_U: Tensor, grad_UD: Tensor, keep_U: Tensor | None) -> None:
        """Adds gradient rows.

        Args:
            position_U: Unique positions in ``rows_UD``.
            grad_UD: Their gradients.
            keep_U: Mask of the rows that count as touched (``padding_idx`` does not); ``None``: all.
        """
        self.mark_used()
        assert self._grad_UD is not None and self._touched_U is not None
        if len(self._grad_UD) < len(self):  # rows were fetched between two backward passes
            more = len(self) - len(self._grad_UD)
            self._grad_UD = torch.cat([self._grad_UD, self._grad_UD.new_zeros(more, grad_UD.shape[1])])
            self._touched_U = torch.cat([self._touched_U, self._touched_U.new_zeros(more)])
        if keep_U is not None:
            position_U, grad_UD = position_U[keep_U], grad_UD[keep_U]
        self._grad_UD.index_add_(0, position_U, grad_UD)
        self._touched_U[position_U] = True

    def accumulate_pooled(self, number: int, grad_BD: Tensor) -> None:
        """Adds the gradient of the bags of a pooled request.

        Args:
            number: The request's number since the window began.
            grad_BD: Gradient of its bags, in full width.
        """
        self.mark_used()
        earlier = self._pooled_grads.get(number)
        self._pooled_grads[number] = grad_BD if earlier is None else earlier + grad_BD

    def mark_used(self) -> None:
        """A backward pass came by."""
        if self._grad_UD is None or self._touched_U is None:
            self._grad_UD = torch.zeros_like(self.rows_UD)
            self._touched_U = torch.zeros(len(self), dtype=torch.bool, device=self.rows_UD.device)

    def touched_count(self) -> int:
        """Number of rows that received a gradient."""
        return 0 if self._touched_U is None else int(self._touched_U.sum())

    def pooled_bits(self) -> int:
        """Bit k is set when pooled request k received a gradient."""
        return sum(1 << number for number in self._pooled_grads)

    def take_pooled(self) -> list[Tensor]:
        """Hands the gradients of the pooled requests over, in the order of their numbers."""
        taken = [self._pooled_grads[number] for number in sorted(self._pooled_grads)]
        self._pooled_grads = {}
        return taken

    @property
    def used(self) -> bool:
        """Whether a backward pass came by, even one without rows."""
        return self._grad_UD is not None

    def take_gradient(self) -> tuple[Tensor, Tensor]:
        """Hands the collected gradient over and starts anew.

        Returns:
            The mask of touched rows [U] and the gradients of these rows [T, D].
        """
        assert self._grad_UD is not None and self._touched_U is not None
        touched_U = torch.zeros(len(self), dtype=torch.bool, device=self.rows_UD.device)
        touched_U[: len(self._touched_U)] = self._touched_U
        grad_TD = self._grad_UD if bool(self._touched_U.all()) else self._grad_UD[self._touched_U]
        self._grad_UD = self._touched_U = None
        return touched_U, grad_TD

    def _found(self, ids_U: Tensor) -> tuple[Tensor, Tensor]:
        if len(self) == 0:
            return torch.zeros_like(ids_U, dtype=torch.bool), torch.zeros_like(ids_U)
        place_U = torch.searchsorted(self._sorted_ids_U, ids_U).clamp_(max=len(self) - 1)
        return self._sorted_ids_U[place_U] == ids_U, place_U
