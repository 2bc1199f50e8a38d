"""Where shards live while they are not on the device: runs of pages in host memory or in a file."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from lightning_embrace.hydra.disk import DiskExtent, DiskFile
from lightning_embrace.hydra.layout import allocate
from lightning_embrace.hydra.ledger import Ledger
from lightning_embrace.hydra.locked import lock_pages

Tier = Literal["host", "disk"]


class Extent(Protocol):
    """A run of whole pages.

    Attributes:
        nbytes: Its length.
    """

    nbytes: int

    def read(self, into: Tensor, start: int = 0) -> None:
        """Fills memory on any device with whole pages from a page on; waits until they are there."""

    def write(self, source: Tensor, start: int = 0) -> None:
        """Keeps whole pages of memory on any device, from a page on; waits until that may be changed again."""

    def memory(self) -> Tensor:
        """Memory of its length from which it can be written: its own, where it has any."""

    def close(self) -> None:
        """Gives its pages back."""


class HostExtent:
    """An extent in host memory.

    Args:
        memory: uint8, whole pages.
        ledger: On which the memory is entered.
        traffic: Counts bytes.
        locked: Its pages are locked, so that a CUDA device can reach them.
    """

    def __init__(self, memory: Tensor, ledger: Ledger, traffic: Counter[str], locked: bool = False) -> None:
        self.nbytes = memory.numel()
        self._memory: Tensor | None = memory
        self._ledger = ledger
        self._traffic = traffic
        self._unlock = weakref.finalize(self, lock_pages(memory)) if locked else None

    def read(self, into: Tensor, start: int = 0) -> None:
        """See :class:`Extent`."""
        assert self._memory is not None
        # on CUDA the copy is one of its stream's, and whoever goes on with it waits there
        into.copy_(self._memory[start : start + into.numel()], non_blocking=self._unlock is not None)
        self._traffic["host read"] += into.numel()

    def write(self, source: Tensor, start: int = 0) -> None:
        """See :class:`Extent`."""
        assert self._memory is not None
        if source.data_ptr() != self._memory.data_ptr():
            self._memory[start : start + source.numel()].copy_(source)
        self._traffic["host written"] += source.numel()

    def memory(self) -> Tensor:
        """See :class:`Extent`."""
        assert self._memory is not None
        return self._memory

    def close(self) -> None:
        """See :class:`Extent`."""
        if self._unlock is not None:
            self._unlock()
        self._memory = None
        self._ledger.give("shards", self.nbytes)


class Store:
    """Host memory and, where there is a folder for it, a file.

    Args:
        device: What shards are moved to.
        host: The host's account.
        folder: For the file, or None.
    """

    def __init__(self, device: torch.device, host: Ledger, folder: Path | None) -> None:
        #: bytes moved so far, by ``"host read"``, ``"host written"``, ``"disk read"``, ``"disk written"``
        self.traffic: Counter[str] = Counter()
        self._pin = device.type == "cuda"
        self._host = host
        self.folder = folder
        self._file = None if folder is None else DiskFile(folder, self.traffic)

    @property
    def has_disk(self) -> bool:
        """Whether there is a disk tier."""
        return self._file is not None

    @property
    def direct(self) -> bool:
        """Whether the file, if there is one, is written past the page cache."""
        return self._file is None or self._file.direct

    def check_disk(self, nbytes: int) -> None:
        """Refuses a plan for whose part on the disk there is no room.

        Raises:
            OSError: There is none.
        """
        if self._file is not None:
            self._file.check_room(nbytes)

    def reserve(self, nbytes: int, tier: Tier) -> Extent:
        """Makes room.

        Args:
            nbytes: Whole pages.
            tier: Where.

        Returns:
            An extent whose content is not defined.

        Raises:
            BudgetError: The host's budget is used up.
            OSError: The disk is full.
        """
        if tier == "disk":
            assert self._file is not None, "no folder for a disk tier"
            extent: DiskExtent = self._file.reserve(nbytes)
            return extent
        self._host.take("shards", nbytes)
        return HostExtent(allocate(nbytes), self._host, self.traffic, self._pin)

    def close(self) -> None:
        """Lets the file go. Extents in host memory live as long as their units."""
        if self._file is not None:
            self._file.close()
            self._file = None
