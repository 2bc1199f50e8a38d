"""Which look-up modules build their columns only, and what becomes of them when the model is there."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from lightning_embrace.tables.build import building_columns
from lightning_embrace.tables.column_tensor import ColumnTensor
from lightning_embrace.tables.find import find_tables
from lightning_embrace.tables.modules import ShardedEmbedding, ShardedEmbeddingBag
from lightning_embrace.tables.parked import is_parked, park_built, parked_tables


def always(nbytes: int) -> bool:
    return True


class Scaled(nn.Embedding):
    """A user's subclass: initialises its table its own way and has something else that it makes with torch.empty."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.empty(7, 3).fill_(1.0))

    def reset_parameters(self) -> None:
        noise = torch.empty((self.num_embeddings, self.embedding_dim)).uniform_()
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)
        with torch.no_grad():
            self.weight.add_(noise)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(nn.Embedding, 19, 5, padding_idx=3),
        functools.partial(nn.EmbeddingBag, 19, 5, mode="sum", padding_idx=-1),
        functools.partial(nn.Embedding, 19, 5, dtype=torch.float64, sparse=True),
        functools.partial(Scaled, 19, 5),
    ],
)
def test_columns_of_what_is_built_plainly(make: Any) -> None:
    """Each rank's weight is its columns of what plain construction gives, and so is whatever is drawn afterwards."""
    torch.manual_seed(0)
    whole = make()
    after = torch.rand(())
    parts = []
    for rank in range(2):
        torch.manual_seed(0)
        with building_columns(rank, 2, always):
            module = make()
        assert torch.equal(torch.rand(()), after)
        park_built(nn.ModuleList([module]), rank, 2)
        parts.append(module.weight.detach())
        assert isinstance(module, type(whole)) and module.weight.dtype == whole.weight.dtype
    assert [p.shape for p in parts] == [(19, 3), (19, 2)]
    assert torch.equal(torch.cat(parts, dim=1), whole.weight)
    if isinstance(whole, Scaled):
        assert module.gain.shape == (7, 3)


def test_what_stays_whole() -> None:
    """Too small, max_norm, given values, the meta device; and everything once the context has ended."""
    with building_columns(0, 2, lambda nbytes: nbytes > 19 * 5 * 4):
        assert not isinstance(nn.Embedding(19, 5).weight, ColumnTensor)
        assert isinstance(nn.Embedding(19, 6).weight, ColumnTensor)
        assert not isinstance(nn.Embedding(19, 6, max_norm=1.0).weight, ColumnTensor)
        assert not isinstance(nn.Embedding.from_pretrained(torch.ones(19, 6), freeze=False).weight, ColumnTensor)
        assert nn.Embedding(19, 6, device="meta").weight.is_meta
        with torch.device("meta"):
            assert not isinstance(nn.Embedding(19, 6).weight, ColumnTensor)
    assert not isinstance(nn.Embedding(19, 6).weight, ColumnTensor)
    with pytest.raises(ZeroDivisionError), building_columns(0, 2, always):
        _ = 1 / 0
    assert not isinstance(nn.Embedding(19, 6).weight, ColumnTensor)


class Model(nn.Module):
    """Two modules that share a table, a bag, and a tied output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(19, 5)
        self.again = nn.Embedding(19, 5)
        self.again.weight = self.words.weight
        self.tied = nn.Embedding(19, 5)
        self.out = nn.Linear(5, 19, bias=False)
        self.out.weight = self.tied.weight
        self.bag = nn.EmbeddingBag(19, 4, sparse=True)


def built(rank: int = 0) -> Model:
    with building_columns(rank, 2, always):
        model = Model()
    park_built(model, rank, 2)
    return model


def test_parked() -> None:
    """Shared tables stay shared, `find_tables` sees their whole shapes, and places are decided as for whole tables."""
    model = built()
    assert type(model.words) is ShardedEmbedding and type(model.bag) is ShardedEmbeddingBag
    assert model.words.weight is model.again.weight and model.out.weight is model.tied.weight
    assert [(t.name, t.rows, t.columns) for t in parked_tables(model)] == [
        ("words", 19, 5),
        ("tied", 19, 5),
        ("bag", 19, 4),
    ]
    specs = {s.name: s for s in find_tables(model, ["*"])}
    assert {n: (s.shape, s.place, s.born) for n, s in specs.items()} == {
        "words": ((19, 5), "sharded", True),
        "tied": ((19, 5), "dense", True),
        "bag": ((19, 4), "sharded", True),
    }
    assert specs["bag"].sparse and not is_parked(model.out)


def test_lookups_are_refused() -> None:
    """Columns are no rows: the message says who can look up, and how to get the whole."""
    model = built()
    for call in (lambda: model.words(torch.tensor([1])), lambda: model.bag(torch.tensor([[1, 20]]))):
        with pytest.raises(RuntimeError, match=r"holds only some columns.*full_state_dict"):
            call()


def test_whole_tables_load() -> None:
    """A checkpoint's tables, each rank its columns; and one of another shape as torch words it."""
    whole = torch.arange(95.0).view(19, 5)
    for rank, (start, stop) in enumerate([(0, 3), (3, 5)]):
        model = built(rank)
        model.words.load_state_dict({"weight": whole})
        assert torch.equal(model.words.weight, whole[:, start:stop])
        with pytest.raises(RuntimeError, match=r"shape \(19, 3\) from checkpoint.*model is \(19, 5\)"):
            model.words.load_state_dict({"weight": whole[:, :3]})


def test_weight_that_nothing_looks_up() -> None:
    """Its shape would silently be that of the columns."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(19, 5).weight

    with building_columns(0, 2, always):
        model = Holder()
    with pytest.raises(ValueError, match=r"`table` was made by an nn.Embedding.*no nn.Embedding of the model"):
        park_built(model, 0, 2)
