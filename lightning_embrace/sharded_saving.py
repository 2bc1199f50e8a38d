"""What Lightning saves and loads where each rank keeps its columns: folders instead of files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_embrace.checkpoint.atomic import local_path
from lightning_embrace.checkpoint.fitting import misfits
from lightning_embrace.checkpoint.layout import MODELS, is_optimizers
from lightning_embrace.checkpoint.optimizer_names import SPARSE, named_state, unpacked_state
from lightning_embrace.checkpoint.optimizer_state import table_numbers
from lightning_embrace.checkpoint.replacing import remove_at_once
from lightning_embrace.checkpoint.sharded import Place, Ranks, Sizes, check_folder, read_folder, read_rest, write_folder
from lightning_embrace.full_saving import FullSavingMixin
from lightning_embrace.refusals import check_folders
from lightning_embrace.session import Session
from lightning_embrace.tables.headers import Act, act_together
from lightning_embrace.tables.modules import handle_of
from lightning_embrace.tables.parked import parked_tables
from lightning_embrace.tables.state import shard_as_dtensor
from lightning_embrace.tables.table import ShardedTable


class ShardedSavingMixin(FullSavingMixin):
    """``state_dict_type="sharded"``, and the reading of folders whatever it is."""

    _gather_objects: Callable[[Any], list[Any]]
    _checkpoints: list[str]

    @property
    def _saves_folders(self) -> bool:
        return self.config.state_dict_type == "sharded"

    def _check_saves(self, session: Session, trainer: Any) -> None:
        """Refuses, before training, checkpoints that could not be written. Collective."""
        if self._saves_folders:
            folders = [getattr(c, "dirpath", None) for c in trainer.checkpoint_callbacks]
            check_folders(self.checkpoint_io, folders, self.namespace)
        else:
            super()._check_saves(session, trainer)

    # ---- saving ----------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What Lightning saves of the model; in a folder, with DTensors for tables. Collective."""
        if not self._saves_folders:
            return super().lightning_module_state_dict()
        assert self.lightning_module is not None
        self._begin_saving()
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What Lightning saves of an optimizer; in a folder, with DTensors for states and names for numbers."""
        if not self._saves_folders:
            return super().optimizer_state(optimizer)
        assert self.lightning_module is not None
        self._begin_saving()
        return named_state(self.lightning_module, self._sharded_tables(), optimizer)

    @contextmanager
    def _saves(self, path: Any, weights_only: bool | None = None, storage_options: Any = None) -> Iterator[None]:
        if self._saves_folders:
            yield
            return
        with super()._saves(path, weights_only, storage_options):
            yield

    def _save_folder(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Writes a folder, every rank its part. Collective."""
        if storage_options is not None:
            raise TypeError(
                "Trainer.save_checkpoint(storage_options=...) is for a CheckpointIO, and a sharded checkpoint is"
                " written by torch.distributed.checkpoint. Leave it out, or set state_dict_type='full'."
            )
        check_folders(self.checkpoint_io, [filepath], self.namespace)
        path = Path(self.broadcast(str(local_path(filepath)))).absolute()
        ranks = Ranks(self.global_rank, self.world_size, self._words, self._gather_objects)
        write_folder(ranks, path, checkpoint, self._checkpoints[-1] if self._checkpoints else None)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a file or a folder on rank 0."""
        path = Path(str(filepath))
        if not path.is_dir():
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            remove_at_once(path)

    def _begin_saving(self) -> None:
        if self._session is not None:
            self._session.pending.settle_all()
            act_together(self._session.comm, Act.STATE)

    def _sharded_tables(self) -> list[ShardedTable]:
        assert self.lightning_module is not None
        return parked_tables(self.lightning_module) if self._session is None else self._session.tables

    def _words(self, words: list[int | str], what: str) -> list[list[Any]]:
        """Tells every rank a few words. Between runs there is only Lightning's group for it."""
        return self._gather_objects(words) if self._connection is None else super()._words(words, what)

    # ---- loading ---------------------------------------------------------------------------------------------------

    def _check_folder(self, path: Path) -> tuple[None, int]:
        """Makes sure that a folder is whole, before any rank reads it; those of a machine share the work."""
        check_folder(path, self.local_rank, len(self.parallel_devices or (0,)))
        return None, 0

    def _read_folder(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """What a folder holds, as a file would; of tables that are sharded already, this rank's columns."""
        return read_folder(path, self._places, weights_only)

    def _places(self, sizes: Sizes) -> Place:
        """Where to read the tensors of a folder into; states of optimizers are left for later.

        Columns are read right where the model has them if nothing else can be wrong with the folder any more.
        """
        model = self.lightning_module
        assert model is not None
        tables = _tables_by_key(model)
        by_shape: dict[tuple[int, ...], ShardedTable] = {(t.rows, t.columns): t for t in tables.values()}
        others = model.state_dict().keys() - tables.keys()
        mine = next((name for name in MODELS if any(path[0] == name for path in sizes)), MODELS[0])
        saved = {path[-1]: size for path, size in sizes.items() if path[0] == mine}
        in_place = self._session is None and not misfits(model, saved, model.strict_loading)

        def place(path: tuple[Any, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
            if is_optimizers(path[0]):
                return torch.empty(size, dtype=dtype, device="meta")
            table = tables.get(path[-1], None if path[-1] in others else by_shape.get(size))
            if table is None or size != (table.rows, table.columns):
                return None
            if in_place and path == (mine, path[-1]) and path[-1] in tables:
                return shard_as_dtensor(table)
            return _columns(table, table.rows, dtype)

        return place

    def _read_optimizer_states(self, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Optimizer states, with what :meth:`_read_folder` has left in the folder: of tables this rank's columns."""
        return [unpacked_state(self._read_state(*pair)) for pair in zip(self.optimizers, states)]

    def _read_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        by_number = table_numbers(self._sharded_tables(), optimizer)

        def place(path: tuple[Any, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
            table = by_number.get(path[1]) if path[0] == "state" else None
            if table is not None and (size == (table.rows, table.columns) or path[-2:] == (SPARSE, "values")):
                return _columns(table, size[0], dtype)
            return None

        read: dict[str, Any] = read_rest(state, place)
        return read


def _columns(table: ShardedTable, rows: int, dtype: torch.dtype) -> Tensor:
    """Room for this rank's columns of some rows, as a DTensor."""
    return shard_as_dtensor(
        table, torch.empty(rows, table.widths[table.rank], dtype=dtype, device=table.parameter.device)
    )


def _tables_by_key(model: nn.Module) -> dict[str, ShardedTable]:
    """The sharded tables by their names in state dicts."""
    handles = ((name, handle_of(module)) for name, module in model.named_modules())
    return {f"{name}.weight".removeprefix("."): handle.table for name, handle in handles if handle is not None}
