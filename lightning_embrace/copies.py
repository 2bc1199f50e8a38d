"""Whole copies of the model that somebody keeps beside it: their tables are sharded as the model's are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_embrace.comm.base import Communicator
from lightning_embrace.shards import Shards
from lightning_embrace.tables.find import TableSpec
from lightning_embrace.tables.headers import Act
from lightning_embrace.tables.request import PooledRequest
from lightning_embrace.tables.table import ShardedTable


class CopySource:
    """What a copy's modules ask for rows (a :class:`~lightning_embrace.tables.lookup.Source`): there are none."""

    in_training_step = in_backward = in_step = False

    def __init__(self) -> None:
        self.shards: Shards | None = None
        self.released = False

    def fetch_rows(self, table: ShardedTable, ids_U: Tensor) -> Tensor:
        """Raises."""
        self._refuse(table)

    def fetch_nothing(self, table: ShardedTable) -> None:
        """Raises."""
        self._refuse(table)

    def fetch_pooled(self, table: ShardedTable, request: PooledRequest) -> Tensor:
        """Raises."""
        self._refuse(table)

    def refuse(self, table: ShardedTable, bad_id: int) -> None:
        """Raises."""
        self._refuse(table)

    def agree(self, act: Act, words: Sequence[int]) -> list[list[int]]:
        """Nothing is exchanged for a copy."""
        return [list(words)]

    @contextmanager
    def changing(self, table: ShardedTable) -> Iterator[None]:
        """A copy may be loaded anew at any time."""
        self.check_alive(table)
        yield

    def shown(self, table: ShardedTable) -> Tensor:
        """What a state dict holds for a table."""
        self.check_alive(table)
        assert self.shards is not None
        return self.shards.shown(table)

    def check_alive(self, table: ShardedTable) -> None:
        """Raises when training has ended with an exception and left the copy sharded."""
        if self.released:
            raise RuntimeError(
                f"{table.name} is still sharded: the last fit ended with an exception and nothing was gathered after"
                " it. Load the last checkpoint."
            )

    def _refuse(self, table: ShardedTable) -> NoReturn:
        raise RuntimeError(
            f"A look-up was made in {table.name}, of which each rank holds some columns. Look up in the model itself,"
            " which has the averaged weights during validation and after training, or keep the tables whole:"
            " EmbRaceStrategy(tables=[])."
        )


class Copy:
    """One copy of the model, from a fit's setup to its teardown.

    Args:
        model: The copy, whole; rank 0's counts. Collective.
        specs: The model's tables.
        comm: Carries the exchanges.
        whose: Who keeps it, for messages.
    """

    def __init__(self, model: nn.Module, specs: Sequence[TableSpec], comm: Communicator, whose: str) -> None:
        self._source = CopySource()
        mine = [_spec_in(model, spec, whose) for spec in specs if spec.place == "sharded"]
        self._source.shards = self._shards = Shards(model, mine, comm, self._source, None)
        #: state dicts that are made inside have whole tables on rank 0, or holes. Collective.
        self.whole = self._shards.whole

    def unshard(self) -> None:
        """Puts whole tables back, on every rank. Collective."""
        self._shards.unshard([])

    def release(self) -> None:
        """Leaves it as it is: whatever reads its tables says that they are sharded."""
        self._shards.remove_hooks()
        self._source.released = True


def agree_on_copies(comm: Communicator, count: int) -> None:
    """Compares how many copies the ranks keep. Collective.

    Raises:
        ValueError: Not equally many.
    """
    counts = comm.gather(torch.tensor([count]), "copies of the model").wait().flatten().tolist()
    if len(set(counts)) > 1:
        raise ValueError(
            f"The ranks' callbacks average weights in {', '.join(map(str, counts))} copies of the model. Give every"
            " rank the same callbacks."
        )


def _spec_in(model: nn.Module, spec: TableSpec, whose: str) -> TableSpec:
    """The same table in the copy, which may be whole where the model's was built as columns."""
    modules: Any = {name: model.get_submodule(name) for name in spec.modules}
    parameter = next(iter(modules.values()))._parameters["weight"]
    born = tuple(parameter.shape) != spec.shape
    return replace(spec, name=f"{whose}'s copy of {spec.name}", parameter=parameter, modules=modules, born=born)
