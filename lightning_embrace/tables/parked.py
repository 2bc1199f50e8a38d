"""Tables that were built as columns, while nobody trains or evaluates: each rank has its columns, no look-up works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from torch import Tensor, nn

from lightning_embrace.tables.column_tensor import ColumnTensor, make_plain
from lightning_embrace.tables.headers import Act
from lightning_embrace.tables.lookup import TableHandle
from lightning_embrace.tables.modules import handle_of, take_over
from lightning_embrace.tables.request import PooledRequest
from lightning_embrace.tables.state import shard_as_dtensor
from lightning_embrace.tables.table import ShardedTable


class Parked:
    """Where the rows of a parked table come from (a :class:`~lightning_embrace.tables.lookup.Source`): nowhere.

    Args:
        shown: What a state dict holds for a table; default a DTensor of this rank's columns.
    """

    in_training_step = in_backward = in_step = False

    def __init__(self, shown: Callable[[ShardedTable], Tensor] = shard_as_dtensor) -> None:
        self._shown = shown

    def fetch_rows(self, table: ShardedTable, ids_U: Tensor) -> Tensor:
        """Raises."""
        _refuse_lookup(table)

    def fetch_nothing(self, table: ShardedTable) -> None:
        """Raises."""
        _refuse_lookup(table)

    def fetch_pooled(self, table: ShardedTable, request: PooledRequest) -> Tensor:
        """Raises."""
        _refuse_lookup(table)

    def refuse(self, table: ShardedTable, bad_id: int) -> None:
        """Raises."""
        _refuse_lookup(table)

    def agree(self, act: Act, words: Sequence[int]) -> list[list[int]]:
        """Nothing is agreed upon without a session."""
        raise RuntimeError(f"Nobody trains, and so no rank {act}. Do it inside the Trainer.")

    def changing(self, table: ShardedTable) -> AbstractContextManager[None]:
        """Loads this rank's columns; nobody has fetched rows that would be stale."""
        return nullcontext()

    def shown(self, table: ShardedTable) -> Tensor:
        """What a state dict holds for a table."""
        return self._shown(table)

    def check_alive(self, table: ShardedTable) -> None:
        """Reading the columns is fine."""


def park(module: nn.Module, table: ShardedTable) -> None:
    """Lets a module hold columns and look nothing up.

    Args:
        module: An ``nn.Embedding`` or ``nn.EmbeddingBag``.
        table: What was known of its table; the windows, hooks and requests of a session are left behind.
    """
    fresh = ShardedTable(
        table.index, table.name, table.parameter, table.sparse, table.columns, table.rank, len(table.ranges)
    )
    take_over(module, TableHandle(fresh, Parked()))


def is_parked(module: nn.Module) -> bool:
    """Whether :func:`park` was called on the module, and no session has taken its table since."""
    handle = handle_of(module)
    return handle is not None and isinstance(handle.source, Parked)


def parked_tables(model: nn.Module) -> list[ShardedTable]:
    """The parked tables of a model, each once."""
    handles = [handle_of(module) for module in model.modules() if is_parked(module)]
    return list({id(h.table.parameter): h.table for h in handles if h is not None}.values())


def park_built(model: nn.Module, rank: int, world_size: int) -> None:
    """Makes ordinary parameters of the column tensors with which a model was built, and parks its tables.

    Args:
        model: The model.
        rank: This process' rank.
        world_size: Number of ranks.

    Raises:
        ValueError: Such a weight stands where nothing looks it up.
    """
    users: dict[int, list[tuple[str, str, nn.Module]]] = {}
    weights: dict[int, ColumnTensor] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if isinstance(parameter, ColumnTensor):
                users.setdefault(id(parameter), []).append((name, key, module))
                weights[id(parameter)] = parameter
    for index, (number, parameter) in enumerate(weights.items()):
        lookups = [(name, m) for name, key, m in users[number] if _looks_up(m, key)]
        if not lookups:
            name, key, _ = users[number][0]
            raise ValueError(
                f"`{name}{'.' if name else ''}{key}` was made by an nn.Embedding in `configure_model`, where each rank"
                " builds only some columns of a table, and no nn.Embedding of the model looks it up. Make it with"
                " `torch.empty`."
            )
        width = parameter.shape[1]
        make_plain(parameter)
        name, module = lookups[0]
        sparse = bool(module.sparse)
        table = ShardedTable(index, name, parameter, sparse, width, rank, world_size)  # type: ignore[arg-type]
        for _, lookup in lookups:
            park(lookup, table)


def _looks_up(module: nn.Module, key: str) -> bool:
    return key == "weight" and isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def _refuse_lookup(table: ShardedTable) -> NoReturn:
    raise RuntimeError(
        f"A look-up in table {table.name!r} was made outside of the Trainer, and this rank holds only some columns of"
        " it (it was built in `configure_model`). Use `trainer.validate`, `test` or `predict` under strategy='embrace',"
        " or load `trainer.strategy.full_state_dict()` or a checkpoint into a model that is built without the Trainer."
    )
