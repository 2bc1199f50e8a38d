"""Vocabularies that have grown: old rows and their states stay, new ones begin as rows begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace import optim
from lightning_embrace.tables.build import building_columns
from lightning_embrace.utilities import resize_embedding

OLD, NEW, COLUMNS = 7, 10, 4


class Words(nn.Module):
    """Two tables of one shape, an output layer that may be tied to the first, and a buffer of their shape."""

    def __init__(self, rows: int = OLD, sparse: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.other = nn.Embedding(OLD, COLUMNS, sparse=sparse)
        self.words = nn.Embedding(rows, COLUMNS, sparse=sparse, padding_idx=-1)
        self.out = nn.Linear(COLUMNS, rows)
        if tied:
            self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids) + self.other(ids)).pow(2).mean()


def step(model: Words, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    optimizer.zero_grad()
    model(ids).backward()
    optimizer.step()


def zeros(rows: Tensor) -> Tensor:
    return rows.zero_()


# ---- in a model ------------------------------------------------------------------------------------------------------


def test_a_model_grows() -> None:
    """The Parameter stays the object, the padding row where it was; the new rows are what `init` makes."""
    model = Words()
    weight, old = model.words.weight, model.words.weight.detach().clone()
    resize_embedding(model, "words", NEW, lambda rows: rows.fill_(3.0))
    assert model.words.weight is weight and weight.shape == (NEW, COLUMNS) and weight.requires_grad
    assert torch.equal(weight[:OLD], old) and (weight[OLD:] == 3.0).all()
    assert model.words.num_embeddings == NEW and model.words.padding_idx == OLD - 1
    model.words(torch.tensor([NEW - 1])).sum().backward()
    assert weight.grad is not None and weight.grad.shape == weight.shape


def test_by_default_new_rows_are_drawn_as_torch_draws_them() -> None:
    model = nn.ModuleDict({"bags": nn.EmbeddingBag(OLD, 1000)})
    resize_embedding(model, "bags", NEW)
    assert abs(float(model["bags"].weight.detach()[OLD:].std()) - 1) < 0.1


def test_tied_layers_grow_too() -> None:
    """Its bias has an entry for each word: zero for the new ones."""
    model = Words(tied=True)
    bias = model.out.bias.detach().clone()
    resize_embedding(model, "words", NEW)
    assert model.out.weight is model.words.weight and model.out.out_features == NEW
    assert torch.equal(model.out.bias[:OLD], bias) and not model.out.bias[OLD:].any()
    assert model(torch.arange(OLD)).isfinite()


class Scaled(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.rows = weight


def test_what_cannot_be_resized() -> None:
    """A name that is no table, fewer rows, columns of a table, a weight whose other use is not known."""
    model = Words()
    with pytest.raises(ValueError, match=r"no nn.Embedding or nn.EmbeddingBag 'out'; it has 'other', 'words'"):
        resize_embedding(model, "out", NEW)
    with pytest.raises(ValueError, match=r"has 7 rows, and 6 were asked for: a table does not shrink"):
        resize_embedding(model, "words", OLD - 1)
    with building_columns(0, 2, lambda _: True):
        built = nn.ModuleDict({"words": nn.Embedding(OLD, COLUMNS)})
    with pytest.raises(ValueError, match="only some columns"):
        resize_embedding(built, "words", NEW)
    model.scaled = Scaled(model.words.weight)
    with pytest.raises(ValueError, match=r"`scaled.rows` too"):
        resize_embedding(model, "words", NEW)
    assert model.words.weight.shape == (OLD, COLUMNS)


# ---- in a checkpoint -------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5),
    "our adagrad": lambda p: optim.Adagrad(p, initial_accumulator_value=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.03),
    "asgd": lambda p: torch.optim.ASGD(p, t0=2),
}


def checkpoint_of(model: Words, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    return {"state_dict": model.state_dict(), "optimizer_states": [o.state_dict() for o in optimizers]}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_grows(tmp_path: Path, name: str, tied: bool) -> None:
    """Training that goes on with more rows is training that had them from the beginning, while nobody used them."""
    torch.manual_seed(0)
    make = OPTIMIZERS[name]
    model = Words(tied=tied)
    optimizer = make(model.parameters())
    always = Words(NEW, tied=tied)
    with torch.no_grad():
        for key, value in model.state_dict().items():
            always.state_dict()[key][: value.shape[0]] = value
        always.out.bias[OLD:] = 0
    always.words.padding_idx = OLD - 1
    always_optimizer = make(always.parameters())
    ids = torch.tensor([0, 1, 1, 5])
    mask = nn.functional.one_hot  # keeps the new rows of the output layer out of the loss

    def loss(m: Words) -> Tensor:
        return (m.out(m.words(ids) + m.other(ids))[:, :OLD] * mask(ids, OLD)).pow(2).sum()

    for m, o in ((model, optimizer), (always, always_optimizer)):
        for _ in range(3):
            o.zero_grad()
            loss(m).backward()
            o.step()
    torch.save(checkpoint_of(model, optimizer), tmp_path / "old.ckpt")
    checkpoint = torch.load(tmp_path / "old.ckpt", weights_only=True, mmap=True)
    resize_embedding(checkpoint, "words", NEW, lambda rows: rows.copy_(always.words.weight.detach()[OLD:]))
    if not tied:
        resize_embedding(checkpoint, "out", NEW, lambda rows: rows.copy_(always.out.weight.detach()[OLD:]))
    grown = Words(NEW, tied=tied)
    grown.words.padding_idx = OLD - 1
    grown_optimizer = make(grown.parameters())
    grown.load_state_dict(checkpoint["state_dict"])
    grown_optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    for m, o in ((grown, grown_optimizer), (always, always_optimizer)):
        o.zero_grad()
        loss(m).backward()
        o.step()
    old = {key: value[:OLD] for key, value in always.state_dict().items()}
    torch.testing.assert_close({k: v[:OLD] for k, v in grown.state_dict().items()}, old)
    for number, state in grown_optimizer.state_dict()["state"].items():
        theirs = always_optimizer.state_dict()["state"][number]
        assert {k: getattr(v, "shape", None) for k, v in state.items()} == {
            k: getattr(v, "shape", None) for k, v in theirs.items()
        }
        torch.testing.assert_close(state, theirs)


def test_sparse_momentum() -> None:
    """torch keeps it as a sparse tensor: the same rows, of a longer table."""
    model = Words(sparse=True)
    optimizer = torch.optim.SGD([model.other.weight, model.words.weight], lr=0.1, momentum=0.9)
    step(model, optimizer, torch.tensor([1, 3]))
    checkpoint = checkpoint_of(model, optimizer)
    before = checkpoint["optimizer_states"][0]["state"][1]["momentum_buffer"].to_dense()
    # the untrained output layer has the tables' shape too
    resize_embedding(checkpoint, "words", NEW, zeros, parameters=[["other.weight", "words.weight"]])
    after = checkpoint["optimizer_states"][0]["state"][1]["momentum_buffer"]
    assert after.is_sparse and after.shape == (NEW, COLUMNS)
    assert torch.equal(after.to_dense()[:OLD], before) and not after.to_dense()[OLD:].any()
    assert checkpoint["optimizer_states"][0]["state"][0]["momentum_buffer"].shape == (OLD, COLUMNS)


def test_names_that_the_optimizer_keeps() -> None:
    """From torch 2.6 on an optimizer may know its parameters' names: whatever their order, the right state grows."""
    model = Words()
    named = list(reversed(list(model.named_parameters())))
    try:
        optimizer = torch.optim.Adam(named)
    except (TypeError, ValueError):
        pytest.skip("this torch knows no names")
    step(model, optimizer, torch.tensor([1, 3]))
    checkpoint = checkpoint_of(model, optimizer)
    resize_embedding(checkpoint, "words", NEW)
    shapes = {
        name: checkpoint["optimizer_states"][0]["state"][n]["exp_avg"].shape[0] for n, (name, _) in enumerate(named)
    }
    assert shapes == {"out.bias": OLD, "out.weight": OLD, "words.weight": NEW, "other.weight": OLD}


def test_states_under_names() -> None:
    """As sharded checkpoints have them, and the files that are made of these."""
    model = Words()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, torch.tensor([1, 3]))
    checkpoint = checkpoint_of(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    [states] = checkpoint["optimizer_states"]
    states["state"] = {names[n]: state for n, state in reversed(states["state"].items())}
    states["param_groups"][0]["params"] = names
    resize_embedding(checkpoint, "words", NEW)
    assert {n: s["exp_avg"].shape[0] for n, s in states["state"].items()} == {
        n: NEW if n == "words.weight" else OLD for n in names
    }


def test_several_optimizers() -> None:
    """The state is the one of the optimizer that trains the table."""
    model = Words()
    first = torch.optim.Adam([model.out.weight, model.out.bias, model.other.weight])
    second = torch.optim.Adam([model.words.weight])
    for optimizer in (first, second):
        step(model, optimizer, torch.tensor([1, 3]))
    checkpoint = checkpoint_of(model, first, second)
    names = [["out.weight", "out.bias", "other.weight"], ["words.weight"]]
    resize_embedding(checkpoint, "words", NEW, parameters=names)
    states = checkpoint["optimizer_states"]
    assert states[1]["state"][0]["exp_avg"].shape[0] == NEW
    assert {s["exp_avg"].shape[0] for s in states[0]["state"].values()} == {OLD}


def test_averages_grow_alike() -> None:
    """WeightAveraging saves averages as the weights, and the current ones beside them: new rows are the same."""
    model = Words()
    checkpoint = {**checkpoint_of(model), "current_model_state": {k: v + 1 for k, v in model.state_dict().items()}}
    resize_embedding(checkpoint, "words", NEW)
    average, current = checkpoint["state_dict"]["words.weight"], checkpoint["current_model_state"]["words.weight"]
    assert torch.equal(average[OLD:], current[OLD:]) and torch.equal(current[:OLD], average[:OLD] + 1)


def test_weights_alone() -> None:
    """A state dict, and a checkpoint without optimizer states."""
    state = dict(Words().state_dict())
    resize_embedding(state, "words", NEW)
    assert state["words.weight"].shape == (NEW, COLUMNS)
    checkpoint = {"state_dict": dict(Words().state_dict())}
    resize_embedding(checkpoint, "words", NEW)
    assert checkpoint["state_dict"]["words.weight"].shape == (NEW, COLUMNS)


def test_what_is_not_clear_is_refused() -> None:
    """No such table; fewer rows; more states of the shape than parameters that could have them. Nothing is changed."""
    model = Words()
    optimizer = torch.optim.Adam([model.words.weight])
    step(model, optimizer, torch.tensor([1, 3]))
    checkpoint = checkpoint_of(model, optimizer)
    with pytest.raises(ValueError, match=r"no table 'word'; it has 'other', 'words', 'out'"):
        resize_embedding(checkpoint, "word", NEW)
    with pytest.raises(ValueError, match="does not shrink"):
        resize_embedding(checkpoint, "words", OLD - 1, parameters=[["words.weight"]])
    with pytest.raises(ValueError, match=r"3 parameters have the shape \(7, 4\) .*, and 1 optimizer states"):
        resize_embedding(checkpoint, "words", NEW)
    with pytest.raises(ValueError, match="names for 2 optimizers, and the checkpoint has 1"):
        resize_embedding(checkpoint, "words", NEW, parameters=[[], []])
    assert checkpoint["state_dict"]["words.weight"].shape == (OLD, COLUMNS)
    assert checkpoint["optimizer_states"][0]["state"][0]["exp_avg"].shape == (OLD, COLUMNS)
