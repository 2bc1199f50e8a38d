"""Holes say what they are, and nobody takes them for values."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_embrace.checkpoint.hole import Hole


def make_hole(rows: int = 4, columns: int = 6, dtype: torch.dtype = torch.float32, number: int = 0) -> Hole:
    """What stands for a table."""
    return Hole.of("words", "call `full_state_dict`.", number, (rows, columns), dtype)


def test_it_says_what_it_is() -> None:
    """Shape, dtype and sizes are those of the whole."""
    hole = make_hole(dtype=torch.bfloat16)
    assert isinstance(hole, torch.Tensor)
    assert (tuple(hole.shape), hole.dtype, hole.ndim, len(hole)) == ((4, 6), torch.bfloat16, 2, 4)
    assert (hole.numel(), hole.element_size(), hole.nbytes, hole.size(1)) == (24, 2, 48, 6)
    assert not hole.is_sparse and not hole.requires_grad and hole.is_floating_point()
    assert "words" in repr(hole)
    assert {"a": hole}["a"] is hole and hole.content_bytes == 48


@pytest.mark.parametrize(
    "read",
    [
        lambda hole: hole.sum(),
        lambda hole: float(hole[0, 0]),
        lambda hole: hole + 1,
        lambda hole: hole.clone(),
        lambda hole: hole.cpu(),
        lambda hole: hole.float(),
        lambda hole: hole.numpy(),
        lambda hole: hole.tolist(),
        lambda hole: torch.isnan(hole),
        lambda hole: torch.zeros(4, 6).copy_(hole),
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda hole: torch.save({"w": hole}, io.BytesIO()),
    ],
)
def test_nobody_reads_it(read: Callable[[Any], Any]) -> None:
    """Values, copies and files of it would be wrong in silence; the error names where the values are."""
    with pytest.raises(RuntimeError, match="full_state_dict"):
        read(make_hole())


def readable() -> tuple[Hole, torch.Tensor]:
    """What stands for a tensor that is in a store."""
    values = torch.arange(24.0).view(4, 6)
    hole = make_hole()
    hole.read = lambda start, rows: values[start : start + rows].clone()
    return hole, values


def test_it_is_read_where_it_can_be() -> None:
    """Every time anew: nothing is kept."""
    hole, values = readable()
    assert hole.device.type == "cpu" and not hole.is_meta and hole.is_contiguous()
    assert hole.sum() == values.sum() and hole[1, 2] == 8 and hole.tolist() == values.tolist()
    for made in (hole.clone(), hole.half().float(), hole + 0, copy.deepcopy(hole), pickle.loads(pickle.dumps(hole))):
        assert type(made) is torch.Tensor and torch.equal(made, values)
    assert torch.equal(torch.stack([hole, hole]), torch.stack([values, values]))
    assert torch.equal(torch.zeros(4, 6).copy_(hole), values)
    assert torch.equal(torch.cat(tensors=[hole, values]), torch.cat([values, values]))


@pytest.mark.parametrize(
    "change",
    [
        lambda hole: hole.mul_(2),
        lambda hole: hole.__setitem__(0, 1.0),
        lambda hole: hole.__iadd__(1),
        lambda hole: torch.add(torch.ones(4, 6), 1, out=hole),
        lambda hole: setattr(hole, "data", torch.ones(4, 6)),
        lambda hole: torch.nn.init.zeros_(hole),
    ],
)
def test_nobody_changes_it(change: Callable[[Any], Any]) -> None:
    """It would be lost in silence."""
    hole, values = readable()
    with pytest.raises(RuntimeError, match="a new one in its place"):
        change(hole)
    assert hole.sum() == values.sum()
