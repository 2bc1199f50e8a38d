"""Files without a name: no end of a process, however sudden, leaves them behind."""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from contextlib import suppress
from pathlib import Path

#: how names begin where a file system wants one
PREFIX = ".hydra-"
#: what file systems answer that cannot do what they are asked
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR)


class Nameless:
    """An empty file, open for reading and writing.

    Where there are no files without a name it has one until it is open; and where an open file cannot lose its name it
    keeps that until it is closed. It is locked, so that :func:`remove_stale` knows what a killed process has left.

    Args:
        folder: Where; it is made if it is missing.
        direct: Whether to write past the page cache, where that can be done.

    Raises:
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path, direct: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale(folder)
        self._path: Path | None = None
        flags = [getattr(os, "O_DIRECT", 0), 0] if direct else [0]
        makers = [self._without_name, self._with_name]
        ways = [(way, flag) for flag in dict.fromkeys(flags) for way in makers]
        for way, flag in ways[:-1]:
            try:
                self.descriptor = way(folder, flag)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
            else:
                self.direct = flag != 0
                return
        way, flag = ways[-1]
        self.descriptor, self.direct = way(folder, flag), False

    @property
    def path(self) -> str:
        """By which this process can open it again."""
        return f"/proc/self/fd/{self.descriptor}" if self._path is None else str(self._path)

    def close(self) -> None:
        """Closes it; it is gone unless somebody has it open."""
        os.close(self.descriptor)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @staticmethod
    def _without_name(folder: Path, flag: int) -> int:
        if not hasattr(os, "O_TMPFILE"):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | flag, 0o600)

    def _with_name(self, folder: Path, flag: int) -> int:
        path = folder / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}.pages"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flag, 0o600)
        except OSError:
            path.unlink(missing_ok=True)  # some file systems make a file before they refuse
            raise
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            path.unlink()
        except OSError:
            self._path = path
        return descriptor


def remove_stale(folder: Path) -> None:
    """Removes files that processes have left which are dead: nobody holds their lock."""
    for path in folder.glob(f"{PREFIX}*.pages"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def cannot_write(folder: Path, error: OSError) -> OSError:
    """The error for a folder that was given and cannot be used."""
    return type(error)(
        error.errno,
        f"HydraStrategy(disk={str(folder)!r}): nothing can be written there: {error.strerror}. Give a folder on a disk"
        " with free space.",
    )
