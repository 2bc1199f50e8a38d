"""What the strategies of the Trainer and of Fabric share when they write files with whole tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from lightning_embrace.checkpoint.agreement import write_together
from lightning_embrace.checkpoint.archive import write_archive
from lightning_embrace.checkpoint.atomic import local_path, written_whole
from lightning_embrace.checkpoint.full import FullSave, Writer
from lightning_embrace.checkpoint.io import AtomicFilesMixin
from lightning_embrace.checkpoint.readers import reader_of_state
from lightning_embrace.checkpoint.weights import write_weights
from lightning_embrace.comm.connect import Connection
from lightning_embrace.mixin import Base
from lightning_embrace.namespaces import Namespace
from lightning_embrace.shards import Shards


class WritingMixin(AtomicFilesMixin, Base):
    """Writes files from rank 0."""

    namespace: ClassVar[Namespace]
    _connection: Connection | None
    _before_collective: Callable[[], None]
    #: the tables for as long as it takes, None: none is sharded. Collective
    _gathering: Callable[[], AbstractContextManager[Shards | None]]
    #: the state dict of a model without sharded tables
    _plain_state: Callable[[], dict[str, Any]]
    #: a file that is being made
    _save: FullSave | None = None
    _said: frozenset[str] = frozenset()

    def save_weights(self, path: str | Path) -> None:
        """Writes the model's weights, with whole tables, as a safetensors file. Collective: call it on all ranks.

        Any program that knows the format reads it: ``model.load_state_dict(safetensors.torch.load_file(path))``, or
        ``safetensors.torch.load_model(model, path)`` where weights are tied; also into a model whose tables are
        sharded. Rank 0 holds no whole table, unless the model's ``state_dict`` is overridden.

        Args:
            path: A local file; its folder is made. One that is there is replaced when all is written.

        Raises:
            ValueError: The path is not local.
            CheckpointError: It could not be written, or the state dict has something that is not a dense tensor.
        """
        local = local_path(path)
        if local is None:
            raise ValueError(f"save_weights({str(path)!r}) writes local files only: give it a path on this machine.")
        with self._saving(None):
            state = self._plain_state() if self._save is None else self._save.model_state()
            write = partial(self._write_whole, state, local, write_weights)
            write_together(self._words, local, write, None)
        self.barrier("save_weights")

    @contextmanager
    def _saving(self, reader: str | None) -> Iterator[None]:
        """One file is made inside, of state dicts that are made inside. Collective.

        Args:
            reader: Who is given its values before it is written, beside what changes the state dict, see `readers`.
        """
        with self._gathering() as shards:
            if shards is None:
                yield
                return
            reader = reader or reader_of_state(shards.model)
            if reader is not None and shards.tables and reader not in self._said:
                self._said |= {reader}
                self.namespace.get_fabric("utilities.rank_zero.rank_zero_info")(
                    f"Files with whole tables are put together in memory on rank 0: {reader} is given their values."
                )
            self._save = FullSave(shards, reader, self._words)
            try:
                yield
            finally:
                self._save = None

    def _words(self, words: list[int | str], what: str) -> list[list[Any]]:
        """Tells every rank that writes a few words, however long a disk takes. Collective."""
        return self._gather_words(words, what)

    def _gather_words(self, words: list[int | str], what: str) -> list[list[Any]]:
        """Tells every rank a few words. Collective while the ranks are connected."""
        if self._connection is None:
            return [words]
        self._before_collective()
        return self._connection.gather_words(words, what)

    def _write_whole(self, content: Any, path: str, writer: Writer = write_archive) -> None:
        """Writes a local file from rank 0. Collective where content has holes."""
        if self._save is not None and self._save.hollow:
            self._save.write(content, path, writer)
        elif self.is_global_zero:
            with written_whole(path) as file:
                writer(file, content)
