"""Puts a finished checkpoint in the place of an older one, so that a process may die at any moment."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from hashlib import blake2s
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def beside(path: Path, state: str) -> Path:
    """A name in the same folder that nobody takes for a checkpoint: Lightning looks for ``last`` in names, and more."""
    return path.with_name(f".embrace-{blake2s(path.name.encode(), digest_size=6).hexdigest()}.{state}")


def unfinished(path: Path) -> Path:
    """Where a checkpoint is written that will be called ``path``."""
    return beside(path, "partial")


def replaced(path: Path) -> Path:
    """Where the older one is for a moment on file systems that cannot exchange two names."""
    return beside(path, "replaced")


def put_in_place(new: Path, path: Path) -> None:
    """Gives a finished file or folder its name; what had it before is removed.

    Args:
        new: What :func:`unfinished` named, complete and on disk.
        path: Its name. There is the old one or the new one whenever the process ends; where the file system
            cannot exchange two names, there may be none for a moment, and the old one is :func:`replaced`.
    """
    if not os.path.lexists(path):
        os.rename(new, path)
        sync_folder(path.parent)
    elif _exchange(new, path):
        sync_folder(path.parent)
        remove(new)
    else:
        old = replaced(path)
        remove(old)
        os.rename(path, old)
        os.rename(new, path)
        sync_folder(path.parent)
        remove(old)


def remove(path: Path) -> None:
    """Removes a file, a folder or a link; what is not there, is removed."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def remove_at_once(path: Path) -> None:
    """Removes a folder that is complete or gone whenever the process ends."""
    gone = beside(path, "removed")
    remove(gone)
    os.rename(path, gone)
    remove(gone)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder outlast a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # some network file systems have none for folders
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(handle)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names at once; whether the system can."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    names = (os.fsencode(one), os.fsencode(other))
    if function(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(other))
