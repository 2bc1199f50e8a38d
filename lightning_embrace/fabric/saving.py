"""What Fabric saves and loads: whole tables and whole optimizer states, as ddp has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_embrace.checkpoint.agreement import write_together
from lightning_embrace.checkpoint.atomic import local_path
from lightning_embrace.checkpoint.io import plain_ios
from lightning_embrace.checkpoint.optimizer_state import shard_optimizer, shard_optimizer_state
from lightning_embrace.checkpoint.readers import reader_at
from lightning_embrace.checkpoint.writing import WritingMixin
from lightning_embrace.fabric.steps import SteppingModule
from lightning_embrace.session import Session
from lightning_embrace.shards import Shards


class SavingMixin(WritingMixin):
    """State dicts of modules and optimizers that were set up, and of others."""

    _session: Session | None
    _convert_stateful_objects_in_state: Callable[..., dict[str, Any]]

    def full_state_dict(self) -> dict[str, Any]:
        """The module's state dict with whole tables on every rank. Collective: call it on all ranks.

        Returns:
            The state dict that plain training would have.
        """
        if self._session is None:
            return self._plain_state()
        return self._session.settled().full_state_dict(to_all=True)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """What Fabric saves: whole tables on rank 0, or holes while it saves a file. Collective."""
        if isinstance(module, SteppingModule) and self._session is not None:
            if self._save is not None:
                return self._save.model_state()
            return self._session.settled().full_state_dict(to_all=False)
        return module.state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads whole tables, each rank its columns. Call it on all ranks."""
        (module.module if isinstance(module, SteppingModule) else module).load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What Fabric saves: whole table states on rank 0, or holes while it saves a file. Collective."""
        if self._session is None:
            return optimizer.state_dict()
        if self._save is not None:
            return self._save.optimizer_state(optimizer)
        return self._session.settled().full_optimizer_state(optimizer, to_all=False)

    def save_checkpoint(  # type: ignore[override]  # to type checkers the base is the Trainer's
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: dict[str, Any] | None = None
    ) -> None:
        """Writes the file from rank 0. Collective.

        Raises:
            CheckpointError: It could not be written.
        """
        with self._saving(self._reader(path, storage_options, filter)):
            content = self._convert_stateful_objects_in_state(state, filter=filter or {})
            local = local_path(path)
            if self._save is not None and self._save.hollow:
                write = partial(self._write_whole, content, str(local))
            else:
                write = partial(self._write_eagerly, content, path, storage_options)
            write_together(self._words, str(path), write, None)

    def _reader(self, path: Any, storage_options: Any, filter: Any) -> str | None:
        """Who is given the values of a checkpoint before it is written."""
        if storage_options is not None or filter:
            return "storage_options" if storage_options is not None else "a filter"
        return reader_at(self.checkpoint_io, path, plain_ios(self.namespace))

    def _write_eagerly(self, content: dict[str, Any], path: Any, storage_options: Any) -> None:
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(content, path, storage_options=storage_options)

    def _plain_state(self) -> dict[str, Any]:
        raise RuntimeError("No module has been set up: call fabric.setup(module, optimizer) first.")

    @contextmanager
    def _gathering(self) -> Iterator[Shards | None]:
        yield None if self._session is None else self._session.settled()

    def _take_columns(self, optimizer: Optimizer) -> None:
        """Of whole states that the optimizer has, and of those that are loaded into it, this rank's columns remain."""
        assert self._session is not None
        shard_optimizer(self._session.tables, optimizer)
        optimizer.register_load_state_dict_pre_hook(partial(_columns, self._session))


def _columns(session: Session, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return shard_optimizer_state(session.tables, optimizer, state_dict)
