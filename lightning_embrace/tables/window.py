"""The rows that this rank has fetched since the table last changed, and the gradient that they collect."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_embrace.tables.request import PooledRequest


class Gradient(NamedTuple):
    """What a window has collected.

    Attributes:
        touched_U: Which rows received a gradient.
        grad_TD: The gradients of these rows.
        pooled: The gradients of pooled requests, in the order of their numbers.
        pooled_bits: Bit k is set when there is one for request k.
    """

    touched_U: Tensor
    grad_TD: Tensor
    pooled: list[Tensor]
    pooled_bits: int


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
        self._lock = threading.Lock()
        #: look-ups whose gradient backward may still bring
        self.waiting = 0
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
        if keep_U is not None:
            position_U, grad_UD = position_U[keep_U], grad_UD[keep_U]
        with self._lock:
            all_UD, touched_U = self._collected()
            all_UD.index_add_(0, position_U, grad_UD)
            touched_U[position_U] = True

    def accumulate_pooled(self, number: int, grad_BD: Tensor) -> None:
        """Adds the gradient of the bags of a pooled request.

        Args:
            number: The request's number since the window began.
            grad_BD: Gradient of its bags, in full width.
        """
        with self._lock:
            self._collected()
            earlier = self._pooled_grads.get(number)
            self._pooled_grads[number] = grad_BD if earlier is None else earlier + grad_BD

    @property
    def used(self) -> bool:
        """Whether a backward pass came by, even one without rows."""
        return self._grad_UD is not None

    def take_gradient(self) -> Gradient | None:
        """Hands the collected gradient over and starts anew; None if there is none."""
        with self._lock:
            if self._grad_UD is None or self._touched_U is None:
                return None
            touched_U = torch.zeros(len(self), dtype=torch.bool, device=self.rows_UD.device)
            touched_U[: len(self._touched_U)] = self._touched_U
            grad_TD = self._grad_UD if bool(self._touched_U.all()) else self._grad_UD[self._touched_U]
            numbers = sorted(self._pooled_grads)
            pooled = [self._pooled_grads[number] for number in numbers]
            self._grad_UD = self._touched_U = None
            self._pooled_grads = {}
        return Gradient(touched_U, grad_TD, pooled, sum(1 << number for number in numbers))

    def _collected(self) -> tuple[Tensor, Tensor]:
        """The gradients of all rows, and which ones are touched, from the first backward pass on."""
        if self._grad_UD is None or self._touched_U is None:
            self._grad_UD = torch.zeros_like(self.rows_UD)
            self._touched_U = torch.zeros(len(self), dtype=torch.bool, device=self.rows_UD.device)
        elif len(self._grad_UD) < len(self):  # rows were fetched between two backward passes
            more = len(self) - len(self._grad_UD)
            self._grad_UD = torch.cat([self._grad_UD, self._grad_UD.new_zeros(more, self._grad_UD.shape[1])])
            self._touched_U = torch.cat([self._touched_U, self._touched_U.new_zeros(more)])
        return self._grad_UD, self._touched_U

    def _found(self, ids_U: Tensor) -> tuple[Tensor, Tensor]:
        if len(self) == 0:
            return torch.zeros_like(ids_U, dtype=torch.bool), torch.zeros_like(ids_U)
        place_U = torch.searchsorted(self._sorted_ids_U, ids_U).clamp_(max=len(self) - 1)
        return self._sorted_ids_U[place_U] == ids_U, place_U
