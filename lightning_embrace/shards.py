"""A model's sharded tables from a fit's setup to its teardown: scatter, gather, give back. Knows no Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_embrace.checkpoint.optimizer_state import (
    Leave,
    gather_optimizer_state,
    restore_optimizer,
    whole_state_bytes,
)
from lightning_embrace.comm.base import Communicator
from lightning_embrace.memory import UNKNOWN, available_bytes, check_room
from lightning_embrace.tables.find import TableSpec
from lightning_embrace.tables.headers import Act, act_together
from lightning_embrace.tables.lookup import Source, TableHandle
from lightning_embrace.tables.modules import give_back, take_over
from lightning_embrace.tables.parked import park
from lightning_embrace.tables.shard import gather_columns, scatter_columns
from lightning_embrace.tables.state import shard_as_dtensor
from lightning_embrace.tables.table import ShardedTable

#: the cure where whole tables do not fit
SAVE_SHARDS = (
    "Save the columns that each rank has: EmbRaceStrategy(state_dict_type='sharded') writes a folder to which every"
    " rank writes its part, and which any number of ranks loads."
)


class Shards:
    """Turns whole tables into this rank's columns, and back. What was built as columns stays so.

    Args:
        model: The model.
        specs: Its tables; those that are to be sharded are, and those that were built as columns and are not to be
            sharded are made whole. Collective.
        comm: Carries the exchanges.
        source: Where look-ups get their rows.
        wire_dtype: dtype of rows and gradients on the wire, None: the table's.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: list[TableSpec],
        comm: Communicator,
        source: Source,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.model = model
        self.comm = comm
        self._specs = [s for s in specs if s.place == "sharded"]
        self._shown: dict[int, Tensor] = {}
        self._originals: list[Tensor] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        for spec in specs:
            if spec.born and spec.place != "sharded":
                self._make_whole(spec)
        self.tables = [self._shard(index, spec, source, wire_dtype) for index, spec in enumerate(self._specs)]

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Gives the model back as it was when something inside raises: an optimizer that is refused, say. Only once."""
        try:
            yield
        except BaseException:
            for table, original in zip(self.tables, self._originals):
                table.parameter.data = original
            self.give_back()
            raise
        finally:
            self._originals = []

    def full_state_dict(self, to_all: bool, leave: Leave | None = None) -> dict[str, Tensor]:
        """The model's state dict with whole tables, on rank 0 or on all ranks, or with holes. Collective.

        Args:
            to_all: Every rank gets the whole tables.
            leave: As in :meth:`whole`.
        """
        with self.whole(to_all, leave):
            # the model's own `state_dict`, overridden or not, sees whole tables as in plain training
            return self.model.state_dict()

    @contextmanager
    def whole(self, to_all: bool = False, leave: Leave | None = None) -> Iterator[None]:
        """State dicts that are made inside have whole tables, on rank 0 or on all ranks, or holes. Collective.

        Args:
            to_all: Every rank gets the whole tables.
            leave: Makes a hole for a table, which is put together later. Nothing is gathered if every rank gives one.
        """
        need = sum(s.nbytes for s in self._specs)
        hollow = self._begin_gathering(need, "whole tables", to_all, leave is not None)
        shown: dict[int, Tensor] = {}
        for table in self.tables:
            if hollow and leave is not None:
                shown[table.index] = leave(table, table.shard_Vd, None)
                continue
            full = gather_columns(self.comm, table, table.shard_Vd, to_all)
            # plain tensors everywhere: what callbacks do with a DTensor on some ranks only would be a collective
            shown[table.index] = table.shard_Vd if full is None else full
        self._shown = shown
        try:
            yield
        finally:
            self._shown = {}

    def shown(self, table: ShardedTable) -> Tensor:
        """What a state dict holds for a table: the whole while it is gathered, else a DTensor of this rank's shard."""
        shown = self._shown.get(table.index)
        return shard_as_dtensor(table) if shown is None else shown

    def full_optimizer_state(self, optimizer: Optimizer, to_all: bool, leave: Leave | None = None) -> dict[str, object]:
        """An optimizer's state dict with whole tables, on rank 0 or on all ranks. Collective.

        Args:
            optimizer: The optimizer.
            to_all: Every rank gets the whole.
            leave: As in :meth:`whole`.
        """
        need = whole_state_bytes(self.tables, optimizer)
        hollow = self._begin_gathering(need, "the optimizer's whole states", to_all, leave is not None)
        return gather_optimizer_state(self.comm, self.tables, optimizer, to_all, leave if hollow else None)

    def unshard(self, optimizers: list[Optimizer]) -> None:
        """Puts whole tables and their optimizer state back, on every rank; not those that never were. Collective."""
        act_together(self.comm, Act.TEARDOWN)
        given = [table for table, spec in zip(self.tables, self._specs) if not spec.born]
        for optimizer in optimizers:
            restore_optimizer(self.comm, given, optimizer)
        for table in self.tables:
            table.parameter.grad = None
        for table in given:
            full = gather_columns(self.comm, table, table.shard_Vd, to_all=True)
            assert full is not None
            # on the CPU, where Lightning's teardown puts everything: one GPU may not hold the whole
            table.parameter.data = full
        self.give_back()

    def give_back(self) -> None:
        """The modules look up in their own weights again, or nowhere if these are columns."""
        self.remove_hooks()
        for table, spec in zip(self.tables, self._specs):
            for module in spec.lookups():
                if spec.born:
                    park(module, table)
                else:
                    give_back(module)

    def remove_hooks(self) -> None:
        """Leaves the parameters as they were found."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _shard(self, index: int, spec: TableSpec, source: Source, wire_dtype: torch.dtype | None) -> ShardedTable:
        """Turns a whole table into this rank's columns; Parameter and modules keep their identity."""
        comm, parameter = self.comm, spec.parameter
        parameter.grad = None
        _, columns = spec.shape
        table = ShardedTable(index, spec.name, parameter, spec.sparse, columns, comm.rank, comm.world_size, wire_dtype)
        self._originals.append(parameter.data)
        if spec.born:
            parameter.data = parameter.data.to(comm.device)
        else:
            parameter.data = scatter_columns(comm, table, parameter.data)
        table.forget()
        handle = TableHandle(table, source)
        for module in spec.lookups():
            take_over(module, handle)
        self._hooks.append(parameter.register_post_accumulate_grad_hook(_refuse_gradient(spec.name)))
        return table

    def _make_whole(self, spec: TableSpec) -> None:
        """Puts a table together that was built as columns before it was known what else uses it."""
        comm, parameter = self.comm, spec.parameter
        _, columns = spec.shape
        table = ShardedTable(0, spec.name, parameter, spec.sparse, columns, comm.rank, comm.world_size)
        full = gather_columns(comm, table, table.shard_Vd, to_all=True)
        assert full is not None
        parameter.data = full.to(parameter.device)
        for module in spec.lookups():
            give_back(module)

    def _begin_gathering(self, need: int, what: str, to_all: bool, hollow: bool) -> bool:
        """Whether every rank leaves holes. Else refuses, on every rank, what does not fit.

        Tables that were whole before have shown that they do.
        """
        rooms, hollows = zip(*act_together(self.comm, Act.STATE, [available_bytes(), int(hollow)]))
        if all(hollows):
            return True
        if any(spec.born for spec in self._specs):
            room = min((r for r in (rooms if to_all else rooms[:1]) if r != UNKNOWN), default=UNKNOWN)
            check_room(need, room, f"To gather {what} on {'every rank' if to_all else 'rank 0'}", SAVE_SHARDS)
        return False


def _refuse_gradient(name: str) -> Callable[[Tensor], None]:
    def refuse(parameter: Tensor) -> None:
        raise RuntimeError(
            f"A gradient reached `{name}.weight` other than through the module's look-up (functional use, or a penalty"
            " over `parameters()`), but this rank holds only some columns of that table. Keep the table whole:"
            f" EmbRaceStrategy(tables=['*', '!{name}'])."
        )

    return refuse
