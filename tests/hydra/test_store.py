"""Pages in host memory and in a file."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_embrace.hydra import disk
from lightning_embrace.hydra.disk import DiskFile
from lightning_embrace.hydra.layout import PAGE, Shape, allocate, lay_out
from lightning_embrace.hydra.ledger import BudgetError, Ledger
from lightning_embrace.hydra.store import Store


def pages(count: int) -> torch.Tensor:
    memory = allocate(count * PAGE)
    return memory.copy_(torch.randint(0, 255, (count * PAGE,), dtype=torch.uint8))


def test_extents_keep_what_is_written(tmp_path: Path) -> None:
    """Each tier, several extents, and exact counts."""
    host = Ledger("host", 10 * PAGE)
    store = Store(torch.device("cpu"), host, tmp_path)
    for tier in ("host", "disk"):
        written = [pages(n) for n in (1, 3, 2)]
        extents = [store.reserve(m.numel(), tier) for m in written]
        for extent, memory in zip(extents, written):
            extent.write(memory)
        for extent, memory in reversed(list(zip(extents, written))):
            back = allocate(memory.numel())
            extent.read(back)
            assert torch.equal(back, memory)
        assert store.traffic[f"{tier} written"] == store.traffic[f"{tier} read"] == 6 * PAGE
    assert host.total == 6 * PAGE
    with pytest.raises(BudgetError, match="20 KiB more on the host would make 44 KiB, and its budget is 40 KiB"):
        store.reserve(5 * PAGE, "host")
    store.close()


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    """Not even while it is used: a killed process cannot leave it either."""
    file = DiskFile(tmp_path / "made", Counter())
    file.reserve(PAGE)
    assert list((tmp_path / "made").iterdir()) == []
    file.close()


def test_pages_are_used_again_and_given_back(tmp_path: Path) -> None:
    """What moves to another tier leaves its pages to others; the last ones go back to the disk."""
    file = DiskFile(tmp_path, Counter())
    first, second, third = (file.reserve(4 * PAGE) for _ in range(3))
    first.close()
    again = file.reserve(3 * PAGE)
    assert length(file) == 12 * PAGE
    memory, back = pages(3), pages(3)
    again.write(memory)
    third.write(pages(4))
    again.read(back)
    assert torch.equal(back, memory)
    for extent in (second, third):
        extent.close()
    assert length(file) == 3 * PAGE
    file.close()


def length(file: DiskFile) -> int:
    return os.fstat(file._descriptor).st_size


@pytest.mark.parametrize("when", ["opened", "used"])
def test_a_file_system_without_direct_access(tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at once or at the first page: it goes on through the page cache."""
    real_open, real_write = os.open, os.pwritev

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real_open(path, flags, *rest)

    def write(descriptor: int, *rest: Any) -> int:
        if file.direct:
            raise OSError(errno.EINVAL, "no")
        return real_write(descriptor, *rest)

    monkeypatch.setattr(*((disk.os, "open", refuse) if when == "opened" else (disk.os, "pwritev", write)))
    file = DiskFile(tmp_path, Counter())
    memory, back = pages(2), pages(2)
    extent = file.reserve(2 * PAGE)
    extent.write(memory)
    extent.read(back)
    assert torch.equal(back, memory) and not file.direct
    file.close()


def test_a_full_disk(tmp_path: Path) -> None:
    """Refused before anything is written, with the arithmetic."""
    file = DiskFile(tmp_path, Counter())
    with pytest.raises(OSError, match=r"1,048,576 GiB are to be spilled to .* GiB free, of which 64 MiB are left"):
        file.reserve(1 << 50)
    file.close()


def test_layout() -> None:
    """Tensors keep dtype and strides, begin where torch's own would, and do not overlap."""
    tensors = [
        torch.randn(3, 5),
        torch.randn(7, dtype=torch.float64),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.tensor(3.0),
        torch.randn(1).expand(5),
    ]
    section = lay_out(Shape.of(t) for t in tensors)
    memory = allocate(section.nbytes)
    assert memory.data_ptr() % PAGE == 0 and section.nbytes % PAGE == 0
    views = section.views(memory)
    for tensor, view in zip(tensors, views):
        view.copy_(tensor)
    for tensor, view in zip(tensors, views):
        assert torch.equal(tensor, view) and tensor.dtype == view.dtype
        assert view.data_ptr() % 64 == 0
    assert views[2].is_contiguous(memory_format=torch.channels_last) and views[3].stride() == (1, 6)
