"""Pages of files that a process holds."""

import mmap
import os
from pathlib import Path

from examples.benchmarks import resident


def test_pages_that_were_read_are_found_and_can_be_read_again(tmp_path: Path) -> None:
    """A mapped file of 100 MB of which one page was read: few pages around it, not all, and no anonymous memory."""
    file = tmp_path / "file"
    with file.open("wb") as sparse:
        sparse.truncate(100_000_000)
    before = set(resident.file_pages())
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as mapped,
    ):
        assert mapped[50_000_000] == 0
        found = set(resident.file_pages()) - before
        resident.touch(found)
        mine = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]
        start, end = (int(address, 16) for address in mine[0].split("-"))
        inside = {page for page in found if start <= page < end}
        size = os.sysconf("SC_PAGE_SIZE")
        assert start + 50_000_000 // size * size in inside
        assert len(inside) * size < 10_000_000
