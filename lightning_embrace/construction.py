"""Tables that are built as columns: in ``configure_model``, at the start of a run, and between runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from lightning_embrace.comm.connect import Connection
from lightning_embrace.config import EmbRaceConfig
from lightning_embrace.memory import available_bytes, check_room
from lightning_embrace.mixin import Base
from lightning_embrace.namespaces import Namespace
from lightning_embrace.optim.trial import count_states
from lightning_embrace.session import Session
from lightning_embrace.shards import SAVE_SHARDS, Shards
from lightning_embrace.tables.build import building_columns
from lightning_embrace.tables.find import TableSpec, find_tables, may_be_sharded
from lightning_embrace.tables.modules import handle_of
from lightning_embrace.tables.parked import Parked, park, park_built, parked_tables


class ConstructionMixin(Base):
    """Builds tables as columns, and holds them where no session does."""

    namespace: ClassVar[Namespace]
    config: EmbRaceConfig
    _session: Session | None
    _connection: Connection | None
    _connect: Callable[[], Connection]

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """``configure_model`` runs inside: of tables that may be sharded, this rank's columns are built.

        Not on one rank, and not in processes that end with the run and hand the model back (spawn, fork).
        """
        module = self.lightning_module
        if self.world_size == 1 or self.config.start_method != "popen" or module is None:
            yield
            return
        wanted = partial(may_be_sharded, patterns=self.config.tables)
        with (
            _generators_of_rank_0(self.broadcast, self.root_device),
            building_columns(self.global_rank, self.world_size, wanted, self._any_rank),
        ):
            yield
        park_built(module, self.global_rank, self.world_size)

    def _any_rank(self, own: bool) -> bool:
        return bool(self.reduce(torch.tensor(int(own), device=self.root_device), reduce_op="sum"))

    def _find_tables(self, fitting: bool) -> list[TableSpec]:
        """The tables that a run shards; one without training, those that were built as columns."""
        assert self.model is not None
        if not fitting and not parked_tables(self.model):
            return []
        specs = find_tables(self.model, self.config.tables)
        return specs if fitting else [s for s in specs if s.born]

    def _let_tables_go(self) -> None:
        """A run without training ends, well or badly: the columns are as they were."""
        module = self.lightning_module
        if self._session is not None and module is not None and module.trainer.state.fn != "fit":
            for m in module.modules():
                if (handle := handle_of(m)) is not None:
                    park(m, handle.table)

    @contextmanager
    def _shards_between_runs(self) -> Iterator[Shards | None]:
        """The tables that were built as columns, where no run holds them; None if there are none. Collective."""
        module = self.lightning_module
        assert module is not None
        if not parked_tables(module):
            yield None
            return
        before, connection = self._connection, self._connect()
        self._connection = connection
        try:
            connection.open_groups()
            shards = Shards(module, _born(module), connection.communicator, Parked(lambda t: shards.shown(t)), None)
            try:
                yield shards
            finally:
                shards.give_back()
            self.barrier("tables are gathered")
        except BaseException as error:
            connection.fail(error)
            connection.abandon()
            raise
        finally:
            self._connection = before
        connection.close()


def check_full_saves(
    session: Session, optimizers: Sequence[Optimizer], callbacks: Sequence[Any], reader: str | None
) -> None:
    """Refuses checkpoints with whole tables that rank 0 could not put together. Collective for tables built as columns.

    Args:
        session: The session, before its first step.
        optimizers: All optimizers.
        callbacks: The callbacks that save checkpoints.
        reader: Who is given the values before a file is written; if nobody is on any rank, there is nothing to refuse.

    Raises:
        ValueError: There is one, and its checkpoints would not fit.
    """
    sharded = [s for s in session.specs if s.place == "sharded"]
    if not any(s.born for s in sharded):
        return
    own = torch.tensor([available_bytes(), int(reader is None)])
    rooms, hollows = zip(*session.comm.gather(own, "memory for checkpoints").wait().tolist())
    if not callbacks or all(hollows):
        return
    need = sum(s.nbytes for s in sharded)
    if any(not getattr(callback, "save_weights_only", False) for callback in callbacks):
        need += sum(_state_bytes(optimizer, sharded) for optimizer in optimizers)
    names = ", ".join(type(callback).__name__ for callback in callbacks)
    because = f"since {reader or 'a callback of another rank'} is given their values"
    what = f"To gather whole tables and their optimizer states on rank 0, as {names} does {because},"
    check_room(need, rooms[0], what, SAVE_SHARDS)


def _state_bytes(optimizer: Optimizer, specs: Sequence[TableSpec]) -> int:
    need = 0
    for group in optimizer.param_groups:
        mine = {id(p) for p in group["params"]}
        need += sum(s.nbytes * count_states(optimizer, group, s.sparse) for s in specs if id(s.parameter) in mine)
    return need


def _born(module: torch.nn.Module) -> list[TableSpec]:
    """The parked tables of a model, as they are."""
    return [replace(s, place="sharded") for s in find_tables(module, "auto") if s.born]


@contextmanager
def _generators_of_rank_0(broadcast: Callable[[Any], Any], device: torch.device) -> Iterator[None]:
    """Every rank draws rank 0's numbers, so that their columns are those of one table. Collective.

    Where the generators differ, a rank has its own back afterwards, as it was.
    """
    cuda = [device] if device.type == "cuda" else []

    def states() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in cuda)]

    theirs = broadcast(states())
    if all(torch.equal(own, their) for own, their in zip(states(), theirs)):
        yield
        return
    with torch.random.fork_rng(cuda):
        torch.set_rng_state(theirs[0])
        for d, state in zip(cuda, theirs[1:]):
            torch.cuda.set_rng_state(state, d)
        yield
