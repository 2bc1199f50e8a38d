"""What the Trainer saves as one file: whole tables and whole optimizer states, as DDP has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_embrace.checkpoint.atomic import local_path
from lightning_embrace.checkpoint.io import plain_ios
from lightning_embrace.checkpoint.readers import reader_at, reader_of_checkpoint, reader_of_state
from lightning_embrace.checkpoint.span import span
from lightning_embrace.checkpoint.writing import WritingMixin
from lightning_embrace.construction import ConstructionMixin, check_full_saves
from lightning_embrace.session import Session
from lightning_embrace.shards import Shards


class FullSavingMixin(WritingMixin, ConstructionMixin):
    """State dicts with whole tables, or with holes that are filled when the file is written."""

    _session: Session | None

    def connect(self, model: Any) -> None:
        """Lightning is about to begin: from here on a save is known from its beginning to its end."""
        super().connect(model)
        if model._trainer is not None:
            span(model.trainer, self._saves)

    def full_state_dict(self) -> dict[str, Any]:
        """The model's state dict with whole tables on every rank. Collective: call it on all ranks.

        Returns:
            The state dict that plain training would have.

        Raises:
            ValueError: Tables that were built as columns would not fit as a whole.
        """
        return self._full_state_dict(to_all=True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What Lightning saves: whole tables on rank 0, or holes while it saves a file. Collective."""
        if self._save is not None:
            return self._save.model_state()
        return self._full_state_dict(to_all=False)

    def _full_state_dict(self, to_all: bool) -> dict[str, Any]:
        with self._gathering() as shards:
            return self._plain_state() if shards is None else shards.full_state_dict(to_all)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What Lightning saves: whole table states on rank 0, or holes while it saves a file. Collective."""
        if self._save is not None:
            return self._save.optimizer_state(optimizer)
        with self._gathering() as shards:
            if shards is None:
                return super().optimizer_state(optimizer)
            return shards.full_optimizer_state(optimizer, to_all=False)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes the file from rank 0. Collective where it has holes."""
        if self._save is not None and self._save.hollow:
            self._write_whole(checkpoint, str(local_path(filepath)))
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _plain_state(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    @contextmanager
    def _gathering(self) -> Iterator[Shards | None]:
        if self._session is not None:
            yield self._session.settled()
        else:
            with self._shards_between_runs() as shards:
                yield shards

    def _reader(self, path: Any, weights_only: bool) -> str | None:
        """Who is given the values of a checkpoint before it is written to this path."""
        assert self.lightning_module is not None
        return reader_at(self.checkpoint_io, path, plain_ios(self.namespace)) or reader_of_checkpoint(
            self.lightning_module.trainer, self.precision_plugin, self.namespace, weights_only
        )

    def _check_saves(self, session: Session, trainer: Any) -> None:
        """Refuses, before the first step, files that rank 0 could not put together. Collective."""
        reader = self._reader(trainer.default_root_dir, False) or reader_of_state(session.settled().model)
        check_full_saves(session, self.optimizers, trainer.checkpoint_callbacks, reader)

    @contextmanager
    def _saves(self, path: Any, weights_only: bool | None = None, storage_options: Any = None) -> Iterator[None]:
        """The Trainer saves a checkpoint inside. Collective."""
        if self.lightning_module is None:  # Lightning says so
            yield
            return
        with self._saving(self._reader(path, bool(weights_only)) if storage_options is None else "storage_options"):
            yield
