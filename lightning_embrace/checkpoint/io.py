"""Lightning's way of writing checkpoints, for files that are there as a whole or not at all."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from lightning_embrace.checkpoint.archive import write_archive
from lightning_embrace.checkpoint.atomic import local_path, written_whole
from lightning_embrace.namespaces import Namespace


@functools.cache
def atomic_io(namespace: Namespace) -> type[Any]:
    """Makes the CheckpointIO for one namespace of Lightning."""
    base: type[Any] = namespace.get_fabric("plugins.io.TorchCheckpointIO")

    class AtomicCheckpointIO(base):  # type: ignore[misc]
        """TorchCheckpointIO, without building a file in memory and without moving it from another folder."""

        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            """Writes a local file beside the one that it replaces when it is whole; others as Lightning does."""
            local = local_path(path)
            if storage_options is not None or local is None:
                super().save_checkpoint(checkpoint, path, storage_options)
                return
            with written_whole(local) as file:
                write_archive(file, checkpoint)

        def __reduce__(self) -> Any:
            return _make, (namespace,)

    return AtomicCheckpointIO


def with_atomic_files(checkpoint_io: Any, namespace: Namespace) -> Any:
    """The CheckpointIO that a strategy was given, with ours where nothing else was chosen.

    Args:
        checkpoint_io: Lightning's, the user's, or None.
        namespace: Of Lightning.

    Returns:
        A CheckpointIO; one that wraps another (AsyncCheckpointIO) wraps ours, unless it was given one.
    """
    if checkpoint_io is None or type(checkpoint_io) in plain_ios(namespace):
        return _make(namespace)
    # by name: Fabric's own package does not have it
    if any(cls.__name__ == "_WrappingCheckpointIO" for cls in type(checkpoint_io).__mro__):
        checkpoint_io.checkpoint_io = _make(namespace)  # where there is one already, nothing happens
    return checkpoint_io


class AtomicFilesMixin:
    """A strategy whose files are there as a whole or not at all."""

    namespace: ClassVar[Namespace]
    _checkpoint_io: Any

    @property
    def checkpoint_io(self) -> Any:
        """What writes files: as Lightning's, but each file is there as a whole or not at all."""
        self._checkpoint_io = with_atomic_files(self._checkpoint_io, self.namespace)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: Any) -> None:
        self._checkpoint_io = checkpoint_io


def plain_ios(namespace: Namespace) -> tuple[type[Any], ...]:
    """The CheckpointIOs that write what torch.save writes, and nothing else."""
    return namespace.get_fabric("plugins.io.TorchCheckpointIO"), atomic_io(namespace)


def _make(namespace: Namespace) -> Any:
    return atomic_io(namespace)()
