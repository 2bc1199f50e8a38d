"""Which pages of files, as libraries are, a process holds: a fork starts without those that its parent only read.

They count as its memory when it reads them again, which it does with some. A fork that touches all of them holds what
a process holds that has imported everything by itself, so peaks of both can be compared.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Iterable, Iterator

_PRESENT, _OF_A_FILE = 1 << 63, 1 << 61  # in an entry of /proc/PID/pagemap
_ENTRY = 8


def file_pages() -> list[int]:
    """Addresses of the pages of files that this process holds now."""
    size = os.sysconf("SC_PAGE_SIZE")
    found = []
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for start, end in _mapped_files():
            pagemap.seek(start // size * _ENTRY)
            entries = array("Q", pagemap.read((end - start) // size * _ENTRY))
            wanted = _PRESENT | _OF_A_FILE
            found += [start + number * size for number, entry in enumerate(entries) if entry & wanted == wanted]
    return found


def touch(pages: Iterable[int]) -> None:
    """Reads from each page, at an address that this process has mapped."""
    for address in pages:
        ctypes.string_at(address, 1)


def _mapped_files() -> Iterator[tuple[int, int]]:
    with open("/proc/self/maps") as maps:
        for line in maps.readlines():
            span, mode, _, _, inode = line.split()[:5]
            if inode != "0" and mode.startswith("r"):
                start, end = (int(address, 16) for address in span.split("-"))
                yield start, end
