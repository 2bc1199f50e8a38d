"""Gradients of tables that stay whole on every rank: as (ids, rows) or dense, whichever is fewer bytes in this step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_embrace.comm.base import Communicator


class _Field(NamedTuple):
    """What a rank says about one replicated table in the closing header."""

    used: int
    rows: int


def dense_elements(table_rows: int, columns: int, sparse: bool) -> int:
    """Elements of the dense form; a sparse table's set of touched rows travels as one more column."""
    return table_rows * (columns + sparse)


def rows_are_smaller(counts: list[int], table_rows: int, columns: int, itemsize: int, sparse: bool = False) -> bool:
    """Whether sending every rank's rows to every other is fewer bytes than AllReducing the whole gradient.

    ```
    rows    every rank sends U rows to N−1 others      Σ U · (D·itemsize + 4) · (N−1) / N  a rank
    dense   ring AllReduce                             2 · (N−1) / N · V·D·itemsize        a rank
    ```

    Args:
        counts: Rows with a gradient, by rank.
        table_rows: V.
        columns: D.
        itemsize: Bytes of an element.
        sparse: The gradient is sparse, see :func:`dense_elements`.

    Returns:
        True when rows should travel.
    """
    return sum(counts) * (columns * itemsize + 4) < 2 * dense_elements(table_rows, columns, sparse) * itemsize


class ReplicatedTable:
    """A table kept whole, and the rows of its gradient on this rank."""

    def __init__(self, name: str, parameter: nn.Parameter, sparse: bool) -> None:
        self.name = name
        self.parameter = parameter
        self.sparse = sparse
        self.ids_U = torch.empty(0, dtype=torch.int64)

    def look(self) -> _Field:
        """Finds the rows that have a gradient; what the closing header says of them."""
        grad = self.parameter.grad
        if grad is None:
            self.ids_U = torch.empty(0, dtype=torch.int64, device=self.parameter.device)
            return _Field(0, 0)
        if grad.is_sparse:
            self.parameter.grad = grad = grad.coalesce()
            self.ids_U = grad.indices()[0]
        else:
            self.ids_U = (grad != 0).any(dim=1).nonzero().squeeze(1)
        return _Field(1, self.ids_U.numel())

    def local_rows(self) -> Tensor:
        """The gradient rows of ``ids_U``, [U, D]."""
        grad = self.parameter.grad
        if grad is None:
            return self.parameter.new_empty(0, self.parameter.shape[1], requires_grad=False)
        return grad.values() if grad.is_sparse else grad[self.ids_U]


class ReplicatedSync:
    """Averages the gradients of replicated tables as DDP does.

    Args:
        comm: Carries the exchanges.
        tables: The replicated, trainable tables.
    """

    def __init__(self, comm: Communicator, tables: list[ReplicatedTable]) -> None:
        self._comm = comm
        self._tables = tables

    def header(self) -> list[int]:
        """This rank's part of the closing header."""
        return [value for table in self._tables for value in table.look()]

    def mean_rows(self, headers: list[list[int]]) -> dict[str, float]:
        """Rows with a gradient, mean over ranks, by table."""
        return {t.name: sum(row[2 * k + 1] for row in headers) / len(headers) for k, t in enumerate(self._tables)}

    def run(self, headers: list[list[int]]) -> None:
        """Exchanges and averages. Collective.

        Args:
            headers: Every rank's :meth:`header`.
        """
        for number, table in enumerate(self._tables):
            fields = [_Field(*row[2 * number : 2 * number + 2]) for row in headers]
            if not any(f.used for f in fields):
                continue
            rows, columns = table.parameter.shape
            counts = [f.rows for f in fields]
            if rows_are_smaller(counts, rows, columns, table.parameter.element_size(), table.sparse):
                self._as_rows(table, counts)
            else:
                self._as_dense(table)

    def _as_rows(self, table: ReplicatedTable, counts: list[int]) -> None:
        comm, parameter = self._comm, table.parameter
        id_dtype = torch.int32 if parameter.shape[0] < 2**31 else torch.int64
        ids = self._to_everybody(table.ids_U.to(id_dtype), counts, f"ids of {table.name}").long()
        columns = parameter.shape[1]
        flat = table.local_rows().reshape(-1)
        values = self._to_everybody(flat, [c * columns for c in counts], f"gradient rows of {table.name}")
        values = values.view(-1, columns).div_(comm.world_size)
        if table.sparse:
            grad = torch.sparse_coo_tensor(ids.unsqueeze(0), values, parameter.shape, check_invariants=False)
            parameter.grad = grad.coalesce()
            return
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        parameter.grad.index_add_(0, ids, values)

    def _to_everybody(self, mine: Tensor, counts: list[int], what: str) -> Tensor:
        comm = self._comm
        sends = [mine.numel()] * comm.world_size
        return comm.all_to_all(mine.repeat(comm.world_size), sends, counts, "replicated", what).wait()

    def _as_dense(self, table: ReplicatedTable) -> None:
        parameter, what = table.parameter, f"dense gradient of {table.name}"
        rows, columns = parameter.shape
        flat = parameter.new_zeros(dense_elements(rows, columns, table.sparse), requires_grad=False)
        gradient = flat[: rows * columns].view(rows, columns)
        flags = flat[rows * columns :]
        if parameter.grad is not None:
            gradient[table.ids_U] = table.local_rows() / self._comm.world_size
            if table.sparse:
                flags[table.ids_U] = 1
        self._comm.all_reduce(flat, "replicated", what).wait()
        if table.sparse:
            ids = flags.nonzero().squeeze(1)
            parameter.grad = torch.sparse_coo_tensor(
                ids.unsqueeze(0), gradient[ids], parameter.shape, is_coalesced=True, check_invariants=False
            )
        elif parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)
