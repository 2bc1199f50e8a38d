"""What Lightning saves and loads, and what all ranks agree on when it does."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lightning_embrace.checkpoint.agreement import read_nothing, read_together, write_together
from lightning_embrace.checkpoint.damage import check_content
from lightning_embrace.checkpoint.fitting import check_fits
from lightning_embrace.checkpoint.io import plain_ios
from lightning_embrace.checkpoint.optimizer_state import shard_optimizer_state
from lightning_embrace.checkpoint.reading import read_file
from lightning_embrace.session import Session
from lightning_embrace.sharded_saving import ShardedSavingMixin
from lightning_embrace.tables.modules import handle_of, is_sharded


class SavingMixin(ShardedSavingMixin):
    """State dicts and checkpoint files of a strategy."""

    _session: Session | None
    _failed: bool
    #: files that were written and not removed, the last one at the end
    _checkpoints: list[str]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What Lightning saves of the model. Collective."""
        self._refuse_to_save_after_failure()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What Lightning saves of an optimizer. Collective."""
        self._refuse_to_save_after_failure()
        return super().optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    @contextmanager
    def _saves(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        if self.lightning_module is not None:
            self._refuse_to_save_after_failure()
        with super()._saves(*args, **kwargs):
            yield

    def load_checkpoint(  # type: ignore[override]  # `weights_only` came later than what we support
        self, checkpoint_path: Any, **options: Any
    ) -> dict[str, Any]:
        """Reads a checkpoint, or raises on every rank what one finds wrong. Collective while the Trainer runs."""
        if self._connection is not None:
            self._connection.agreed_on_start = True
        path = str(checkpoint_path)
        if Path(path).is_dir():
            read_together(self._gather_words, path, partial(self._check_folder, Path(path)))
        return read_together(self._gather_words, path, partial(self._read, path, options))

    def _resume_from_nothing(self) -> None:
        """A run begins. Where no checkpoint has been read, no rank may have read one. Collective."""
        assert self._connection is not None
        if not self._connection.agreed_on_start:
            self._connection.agreed_on_start = True
            read_nothing(self._gather_words)

    def _read(self, path: str, options: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """What a checkpoint holds, and a number that differs where it does.

        Of tables that are sharded already each rank reads its columns, when they are loaded.
        """
        assert self.lightning_module is not None
        if Path(path).is_dir():
            content = self._read_folder(Path(path), options.get("weights_only"))
            return content, check_content(content)
        handles = [handle for module in self.lightning_module.modules() if (handle := handle_of(module)) is not None]
        shapes = {(h.table.rows, h.table.columns) for h in handles}
        read = read_file(
            path,
            type(self.checkpoint_io) in plain_ios(self.namespace),
            (lambda t: tuple(t.shape) in shapes) if shapes else None,
            options.get("weights_only"),
            partial(super().load_checkpoint, path, **options),
            self.local_rank,
            len(self.parallel_devices or (0,)),
        )
        return read.content, read.number

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads weights, each rank its columns; of another model, none."""
        assert self.lightning_module is not None
        check_fits(self.lightning_module, checkpoint["state_dict"], strict)
        super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads full optimizer states, each rank its columns."""
        states = self._read_optimizer_states(checkpoint["optimizer_states"])
        if self._session is not None:
            tables = self._session.tables
            states = [shard_optimizer_state(tables, o, s) for o, s in zip(self.optimizers, states)]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes the file from rank 0, and waits for it however long that takes. Collective."""
        if self._saves_folders:
            self._save_folder(checkpoint, filepath, storage_options)
        else:
            write = partial(super().save_checkpoint, checkpoint, filepath, storage_options=storage_options)
            last = self._checkpoints[-1] if self._checkpoints else None
            write_together(self._words, str(filepath), write, last)
        self._checkpoints.append(str(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes the file on rank 0."""
        super().remove_checkpoint(filepath)
        self._checkpoints = [path for path in self._checkpoints if path != str(filepath)]

    def _refuse_to_save_after_failure(self) -> None:
        if self._session is not None and not self._failed and self._interrupted():
            # callbacks (OnExceptionCheckpoint) save before Lightning tells the strategy of the exception
            self.on_exception(sys.exc_info()[1] or KeyboardInterrupt())
        assert self.lightning_module is not None
        sharded = self._session is not None or any(is_sharded(m) for m in self.lightning_module.modules())
        if self._failed and sharded and self.world_size > 1:
            last = f"The last whole checkpoint is {self._checkpoints[-1]}." if self._checkpoints else None
            raise RuntimeError(
                "Training ended with an exception while tables were sharded; the ranks may be at different points of a"
                f" step, so nothing is saved. {last or 'No checkpoint was written before it.'}"
            )

    def _interrupted(self) -> bool:
        trainer = getattr(self.lightning_module, "_trainer", None)
        return trainer is not None and trainer.state.status == "interrupted"
