"""Which modules are blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_embrace.hydra.partition import divide
from tests.hydra import zoo


def names(model: nn.Module, *patterns: str) -> list[str]:
    return [b.name for b in divide(model, list(patterns) or "auto").blocks]


def test_members_of_large_lists() -> None:
    assert names(zoo.Stack()) == [f"blocks.{i}" for i in range(6)]


def test_two_lists() -> None:
    found = names(zoo.Seq2Seq())
    assert found == [f"body.{part}.layers.{i}" for part in ("encoder", "decoder") for i in range(3)]


def test_a_list_within_a_list() -> None:
    """The large member of an outer Sequential is taken apart, small members are blocks themselves."""
    inner = nn.Sequential(*(nn.Sequential(nn.Linear(20, 20), nn.ReLU()) for _ in range(5)))
    model = nn.Module()
    model.net = nn.Sequential(nn.Linear(4, 20), inner, nn.ReLU(), nn.Linear(20, 1))
    assert names(model) == ["net.0", *(f"net.1.{i}" for i in range(5)), "net.3"]


def test_small_lists_are_glue() -> None:
    model = zoo.Stack()
    model.head = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    assert names(model) == [f"blocks.{i}" for i in range(6)]


def test_patterns() -> None:
    """A list by its name is its members; "!" excludes."""
    model = zoo.Seq2Seq()
    assert names(model, "body.encoder.layers") == [f"body.encoder.layers.{i}" for i in range(3)]
    assert names(model, "body.*coder.layers.?", "!*.1") == [
        f"body.{part}.layers.{i}" for part in ("encoder", "decoder") for i in (0, 2)
    ]
    with pytest.raises(ValueError, match=r"'nothing' matches no module.*'body\.encoder\.layers'"):
        names(model, "nothing")


def test_shared_parameters() -> None:
    """Blocks that share are one unit; what is used outside of blocks stays outside."""
    model = zoo.Tied()
    parts = divide(model)
    assert parts.units == ((0, 4), (1, 2), (3,), (5,))
    assert any(p is model.first.weight for p in parts.glue)
    assert not any(p is model.first.weight for block in parts.blocks for p in block.parameters)


def test_one_module_in_two_places() -> None:
    model = zoo.Stack()
    model.blocks[3] = model.blocks[1]
    assert names(model) == [f"blocks.{i}" for i in (0, 1, 2, 4, 5)]


def test_every_parameter_is_somewhere_once() -> None:
    for model in (zoo.Tied(), zoo.Seq2Seq(), zoo.Stack(), zoo.Structured()):
        parts = divide(model)
        inside = {id(p) for block in parts.blocks for p in block.parameters}
        outside = [id(p) for p in parts.glue]
        assert inside.isdisjoint(outside) and len(set(outside)) == len(outside)
        assert inside | set(outside) == {id(p) for p in model.parameters()}


def test_large_layers_outside_of_lists() -> None:
    """Where there is no room for them, they are blocks too, the largest first, in the order of the model."""
    layers = [f"blocks.{i}" for i in range(4)]
    both = 2 * 4 * (300 * 24 + 300 + 300 * 24)  # with gradients
    for room, expected in ((both, layers), (both - 1, [*layers, "head"]), (0, ["words", *layers, "head"])):
        assert [b.name for b in divide(zoo.Language(), "auto", room).blocks] == expected
    tied = divide(zoo.Language(tied=True), "auto", 0)
    assert [b.name for b in tied.blocks] == ["words", *layers, "head"]
    assert tied.units == ((0, 5), (1,), (2,), (3,), (4,)) and tied.glue == ()


def test_no_lists() -> None:
    parts = divide(nn.Linear(2, 2))
    assert parts.blocks == () and len(parts.glue) == 2


def test_a_module_that_is_inside_and_outside_of_blocks() -> None:
    """Its parameters are needed where no block is called; a large one is a block itself, with those that have it."""
    model = zoo.Language()
    model.blocks[1].words = model.words
    parts = divide(model)
    assert any(p is model.words.weight for p in parts.glue)
    assert not any(p is model.words.weight for block in parts.blocks for p in block.parameters)
    parts = divide(model, glue_room=1000)
    assert [b.name for b in parts.blocks if b.module is model.words] == ["words"]
    assert [{parts.blocks[i].name for i in unit} for unit in parts.units if len(unit) > 1] == [{"words", "blocks.1"}]


def test_what_is_excluded_is_no_block() -> None:
    """Nor are its parts, nor does it become one where there is little room for what is outside."""
    model = zoo.Language()
    assert names(model, "!blocks.1") == ["blocks.0", "blocks.2", "blocks.3"]
    assert names(model, "blocks", "!blocks.1") == ["blocks.0", "blocks.2", "blocks.3"]
    inside = [f"blocks.{i}" for i in range(4)]
    assert [b.name for b in divide(model, glue_room=1000).blocks] == ["words", *inside, "head"]
    assert [b.name for b in divide(model, ["!words"], glue_room=1000).blocks] == [*inside, "head"]


def test_what_is_never_called_is_no_block() -> None:
    """However large it is: its parameters are read past any call."""
    model = zoo.Stack()
    model.tables = nn.ParameterList([nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(1000))])
    found = [b.name for b in divide(model, glue_room=100).blocks]
    assert "first" in found and "tables" not in found
