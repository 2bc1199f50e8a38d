"""safetensors files, read by the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from lightning_embrace.checkpoint.filling import fill
from lightning_embrace.checkpoint.weights import _NAMES, write_weights
from tests.checkpoint.test_archive import whole
from tests.checkpoint.test_hole import make_hole
from tests.support.lifecycle import assert_same


def write(path: Path, state: dict[str, Any]) -> None:
    with path.open("w+b") as file:
        for hole, room in write_weights(file, state):  # type: ignore[arg-type]
            fill(file, room, whole(hole).split(3))  # type: ignore[arg-type]


def test_every_dtype(tmp_path: Path) -> None:
    """Numbers, shapes and dtypes come back, of tensors that are strided, empty or scalar, too; large elements first."""
    state: dict[str, Any] = {}
    for number, dtype in enumerate(_NAMES):
        value = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)
        state |= {f"{number}": value, f"{number}.scalar": value[1, 1].clone(), f"{number}.turned": value.t()}
    state["empty"] = torch.empty(0, 3)
    path = tmp_path / "a.safetensors"
    write(path, state)
    loaded = load_file(path)
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        assert loaded[name].dtype == value.dtype and loaded[name].shape == value.shape
        assert torch.equal(loaded[name].double(), value.double())


def test_holes(tmp_path: Path) -> None:
    """They are filled afterwards, also the last one of the file, and can be read in part."""
    holes = {"a": make_hole(4, 6), "z": make_hole(9, 4, torch.bfloat16, 1), "m": make_hole(5, 2, torch.float64, 2)}
    path = tmp_path / "a.safetensors"
    write(path, {**holes, "dense": torch.ones(3)})
    loaded = load_file(path)
    for name, hole in holes.items():
        assert torch.equal(loaded[name], whole(hole))
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_slice("a")[:, 1:3], whole(holes["a"])[:, 1:3])
        assert file.metadata() == {"format": "pt"}


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.words.weight


def test_tied_weights(tmp_path: Path) -> None:
    """They are there once, under the name that the library chooses, and its `load_model` knows of the other."""
    torch.manual_seed(0)
    model, other = Tied(), Tied()
    path = tmp_path / "a.safetensors"
    write(path, model.state_dict())
    assert sorted(load_file(path)) == ["head.bias", "head.weight"]
    load_model(other, path)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    hole = make_hole()
    write(path, {"b.weight": hole, "a.weight": hole})
    assert sorted(load_file(path)) == ["a.weight"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": 1}, "a dict"),
        (torch.ones(2, 2).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(2, dtype=torch.complex64), "dtype torch.complex64"),
    ],
)
def test_what_the_format_cannot_hold(tmp_path: Path, value: Any, said: str) -> None:
    """It is named, with what to write instead."""
    with pytest.raises(ValueError, match=rf"{said}.*'extra'.*weights_only=True"):
        write(tmp_path / "a.safetensors", {"w": torch.ones(2), "extra": value})
