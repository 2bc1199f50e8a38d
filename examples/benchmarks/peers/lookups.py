"""Takes the tables out of a model: what each batch looks up, and how rows from elsewhere come in instead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Table:
    """A table that was taken out.

    Attributes:
        name: Of its first module, without dots.
        weight: Its rows, as the model was seeded.
        modules: The modules that look up in it, by name.
    """

    name: str
    weight: nn.Parameter
    modules: dict[str, nn.Embedding] = field(default_factory=dict)


@dataclass(frozen=True)
class Lookup:
    """One look-up of a batch.

    Attributes:
        table: The table's name.
        ids: What it asks for.
    """

    table: str
    ids: Tensor


def find_tables(model: nn.Module) -> list[Table]:
    """The tables that only ``nn.Embedding`` modules use: a weight tied to another module has a dense gradient."""
    tables: dict[int, Table] = {}
    tied: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if not isinstance(module, nn.Embedding):
                tied.add(id(parameter))
                continue
            if module.max_norm is not None or module.scale_grad_by_freq:
                raise NotImplementedError(f"{name}: a look-up with max_norm or scale_grad_by_freq has no counterpart.")
            table = tables.setdefault(id(parameter), Table(name.replace(".", "_"), parameter))
            table.modules[name] = module
    return [table for key, table in tables.items() if key not in tied]


class Stub(nn.Module):
    """Stands where an ``nn.Embedding`` was: zeros while look-ups are recorded, given rows afterwards.

    Args:
        table: The table's name.
        module: What it replaces.
        source: Called with the table's name and the ids; returns their rows.
    """

    def __init__(self, table: str, module: nn.Embedding, source: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__()
        self.table = table
        self.padding_idx = module.padding_idx
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim
        self._source = source

    def forward(self, ids: Tensor) -> Tensor:
        rows = self._source(self.table, ids)
        if self.padding_idx is None:
            return rows
        return torch.where((ids == self.padding_idx).unsqueeze(-1), rows.detach(), rows)


class Emptied:
    """A model without its tables.

    Args:
        model: The model; each of its look-up modules is replaced.
        tables: From :func:`find_tables`.
    """

    def __init__(self, model: nn.Module, tables: Sequence[Table]) -> None:
        self._model = model
        self._widths = {table.name: table.weight.shape[1] for table in tables}
        self._dtypes = {table.name: table.weight.dtype for table in tables}
        self._recorded: list[Lookup] | None = None
        self._rows: deque[tuple[Lookup, Tensor]] = deque()
        for table in tables:
            for name, module in table.modules.items():
                parent, _, key = name.rpartition(".")
                setattr(model.get_submodule(parent), key, Stub(table.name, module, self._look_up))

    def record(self, step: Callable[[], Any]) -> list[Lookup]:
        """Runs a step on zero rows.

        Returns:
            Its look-ups in the order of the calls.
        """
        self._recorded = recorded = []
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            step()
        self._recorded = None
        return recorded

    @contextmanager
    def rows(self, lookups: Sequence[Lookup], rows: dict[str, Tensor]) -> Iterator[None]:
        """Inside, the look-ups of a step return these rows: of each table, one after the other."""
        taken = dict.fromkeys(rows, 0)
        for lookup in lookups:
            start, stop = taken[lookup.table], taken[lookup.table] + lookup.ids.numel()
            taken[lookup.table] = stop
            self._rows.append((lookup, rows[lookup.table][start:stop].view(*lookup.ids.shape, -1)))
        yield
        if self._rows:
            raise RuntimeError(f"{len(self._rows)} look-ups that were recorded did not come.")

    def _look_up(self, table: str, ids: Tensor) -> Tensor:
        if self._recorded is not None:
            self._recorded.append(Lookup(table, ids.clone()))
            return torch.zeros(*ids.shape, self._widths[table], dtype=self._dtypes[table])
        if not self._rows:
            raise RuntimeError(f"A look-up in {table!r} came that was not recorded.")
        lookup, rows = self._rows.popleft()
        if lookup.table != table or not torch.equal(lookup.ids, ids):
            raise RuntimeError(f"Another look-up in {table!r} was recorded than came: the ids depend on table rows.")
        return rows


def ids_of(lookups: Sequence[Lookup], table: str) -> Tensor:
    """All ids that a batch looks up in a table, in the order of the calls."""
    ids = [lookup.ids.flatten() for lookup in lookups if lookup.table == table]
    return torch.cat(ids) if ids else torch.empty(0, dtype=torch.long)
