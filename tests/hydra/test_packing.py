"""Tensors that are written piece by piece."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from lightning_embrace.hydra import packing
from lightning_embrace.hydra.disk import DiskFile
from lightning_embrace.hydra.layout import PAGE, Shape, allocate, lay_out

CPU = torch.device("cpu")


@pytest.mark.parametrize("pages", [1, 2, 5, 100])
def test_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    """Tensors that end within a piece, fill it, or reach over several; others that are there stay.

    Whatever strides they have: what is read back is laid out as the section says.
    """
    monkeypatch.setattr(packing, "PACKING", pages * PAGE)
    like = [torch.empty(3, 5), torch.empty(2000), torch.empty(40, 90), torch.empty(()), torch.empty(30, 30).t()]
    section = lay_out(Shape.of(t) for t in like)
    extent = DiskFile(tmp_path, Counter()).reserve(section.nbytes)
    first = {n: torch.randn(tuple(like[n].shape)) for n in (0, 1, 2, 4)}
    second = {1: torch.ones(()).expand(2000), 2: torch.randn(90, 40).t(), 3: torch.tensor(3.0)}
    packing.write_packed(first, section, extent, keep=False, device=CPU)
    packing.write_packed(second, section, extent, keep=True, device=CPU)
    memory = allocate(section.nbytes)
    extent.read(memory)
    for place, value in {**first, **second}.items():
        assert torch.equal(section.views(memory)[place], value), place
