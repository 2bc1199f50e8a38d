"""Files that are there as a whole, or not at all."""

from __future__ import annotations

import glob
import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_embrace.checkpoint.replacing import sync_folder

#: how the names of files begin that are being written. One that is older than every run is what a killed run has left
PARTIAL = ".embrace-partial-"


def local_path(path: Any) -> str | None:
    """The path of a file on this machine (``"file://…"``, ``"~/…"``), None for one that is elsewhere."""
    file_system, stripped = url_to_fs(str(path))
    return str(stripped) if isinstance(file_system, LocalFileSystem) else None


@contextmanager
def written_whole(path: str) -> Iterator[BinaryIO]:
    """Opens a file that takes its name when all is written and on the disk; then it replaces one of that name.

    It is written beside the other one, under a name that begins with :data:`PARTIAL`. When something fails that is
    removed, and what was there before is as it was; after a kill it is removed by whoever writes to that path next.

    Args:
        path: The name. Folders are made.

    Raises:
        OSError: It could not be written.
    """
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    # the name itself must not be in it: Lightning finds files to resume from by parts of their names
    partial = os.path.join(folder, PARTIAL + hashlib.sha256(name.encode()).hexdigest()[:12])
    for left in glob.glob(f"{glob.escape(partial)}-*"):
        with suppress(FileNotFoundError):
            os.remove(left)
    partial += f"-{uuid.uuid4().hex[:8]}"
    try:
        with open(partial, "x+b") as file:
            yield cast(BinaryIO, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.remove(partial)
        raise
    with suppress(OSError):  # the file has its name by now
        sync_folder(Path(folder))
