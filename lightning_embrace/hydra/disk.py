"""A file of pages that is gone when its process is."""

from __future__ import annotations

import errno
import os
import shutil
import weakref
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from lightning_embrace.hydra.layout import allocate
from lightning_embrace.hydra.locked import lock_pages
from lightning_embrace.hydra.nameless import Nameless, cannot_write
from lightning_embrace.hydra.ranges import Ranges
from lightning_embrace.hydra.sizes import human

#: what one call moves
_PIECE = 64 << 20
#: what is left free on the disk for others
_SPARE = 64 << 20


class DiskFile:
    """One file, written past the page cache, which would hide the disk and take memory that nobody has counted.

    Args:
        folder: Where; it is made if it is missing.
        traffic: Counts bytes.

    Raises:
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path, traffic: Counter[str]) -> None:
        self._folder = folder
        self._traffic = traffic
        try:
            self._file = Nameless(folder, direct=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
        #: whether it is written past the page cache
        self.direct = self._file.direct
        self._descriptor = self._file.descriptor
        self._used = Ranges()
        self._staging: Tensor | None = None
        # where there is no direct access: runs, by offset and length, that may be in the page cache alone
        self._unwritten: list[tuple[int, int]] = []

    def reserve(self, nbytes: int) -> DiskExtent:
        """Allocates pages on the disk, so that no later write can fail for want of them.

        Raises:
            OSError: There is no room; nothing was allocated.
        """
        before = self._used.end
        offset = self._used.take(nbytes)
        more = self._used.end - before
        try:
            if more:
                self.check_room(self._used.end, before)
                os.posix_fallocate(self._descriptor, before, more)
        except OSError:
            self.give_back(offset, nbytes)
            raise
        return DiskExtent(self, offset, nbytes)

    def check_room(self, nbytes: int, there: int | None = None) -> None:
        """Refuses what the disk has no room for, before anything is written.

        Args:
            nbytes: Of the file, in all.
            there: What it has of them; None: what is reserved now.

        Raises:
            OSError: There is no room.
        """
        there = self._used.end if there is None else there
        free = shutil.disk_usage(self._folder).free
        if nbytes > there and nbytes - there + _SPARE > free:
            raise OSError(
                errno.ENOSPC,
                f"{human(nbytes)} are to be spilled to {self._folder}, {human(nbytes - there)} more than are there, and"
                f" its disk has {human(free)} free, of which {human(_SPARE)} are left to others. Give"
                " HydraStrategy(disk=...) a folder on another disk, or more host_memory.",
            )

    def give_back(self, offset: int, nbytes: int) -> None:
        """Pages are free: others may be there, and the disk has them again where they were the last ones."""
        before = self._used.end
        self._used.give(offset, nbytes)
        if self._used.end < before:
            os.ftruncate(self._descriptor, self._used.end)

    def read(self, offset: int, into: Tensor) -> None:
        """Reads pages into memory of any device."""
        self._move(offset, into, writing=False)
        self._traffic["disk read"] += into.numel()

    def write(self, offset: int, source: Tensor) -> None:
        """Writes pages from memory of any device."""
        self._move(offset, source, writing=True)
        self._traffic["disk written"] += source.numel()

    def close(self) -> None:
        """Gives the file's pages back to the disk."""
        self._file.close()

    def _move(self, offset: int, memory: Tensor, writing: bool) -> None:
        for start in range(0, memory.numel(), _PIECE):
            piece = memory[start : start + _PIECE]
            here = piece
            if piece.device.type != "cpu":
                here = self._stage()[: piece.numel()]
                if writing:
                    here.copy_(piece)
            self._transfer(offset + start, here.numpy().data, writing)
            if here is not piece and not writing:
                piece.copy_(here)
        if not self.direct:
            self._drop_from_cache(offset, memory.numel(), writing)

    def _drop_from_cache(self, offset: int, nbytes: int, written: bool) -> None:
        """What was read or written is not kept a second time. The disk is waited for once in many writes."""
        runs = [(offset, nbytes)]
        if written:
            self._unwritten += runs
            if sum(count for _, count in self._unwritten) < _PIECE:
                return
            os.fdatasync(self._descriptor)
            runs, self._unwritten = self._unwritten, []
        for run in runs:
            os.posix_fadvise(self._descriptor, *run, os.POSIX_FADV_DONTNEED)

    def _transfer(self, offset: int, view: memoryview, writing: bool) -> None:
        done = 0
        while done < len(view):
            try:
                rest = [view[done:]]
                call = os.pwritev if writing else os.preadv
                count = call(self._descriptor, rest, offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self._without_direct()  # accepted when it was opened, and not when it was used
                continue
            if count == 0:
                raise OSError(errno.EIO, f"the store in {self._folder} has ended before its last page")
            done += count

    def _without_direct(self) -> None:
        import fcntl

        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False

    def _stage(self) -> Tensor:
        if self._staging is None:
            self._staging = allocate(_PIECE)
            if torch.cuda.is_available():
                weakref.finalize(self, lock_pages(self._staging))
        return self._staging


class DiskExtent:
    """Pages of the file."""

    def __init__(self, file: DiskFile, offset: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._file = file
        self._offset = offset

    def read(self, into: Tensor, start: int = 0) -> None:
        """See :class:`~lightning_embrace.hydra.store.Extent`."""
        self._file.read(self._offset + start, into)

    def write(self, source: Tensor, start: int = 0) -> None:
        """See :class:`~lightning_embrace.hydra.store.Extent`."""
        self._file.write(self._offset + start, source)

    def memory(self) -> Tensor:
        """See :class:`~lightning_embrace.hydra.store.Extent`."""
        return allocate(self.nbytes)

    def close(self) -> None:
        """See :class:`~lightning_embrace.hydra.store.Extent`."""
        self._file.give_back(self._offset, self.nbytes)
