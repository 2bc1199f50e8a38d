"""The four models alone: sizes, shares, tying, and two steps of plain training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from examples.benchmarks.data import Zipf, make_batch, words_of
from examples.models import GNMT, Bert
from examples.models.registry import MODELS, batch_spec, build, embedding_share
from examples.models.transformer import CausalDecoderLayer, sinusoids
from tests.support.example_models import fit, quiet, tiny


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", ["small", "paper"])
def test_the_tables_have_the_published_share(name: str, size: Any) -> None:
    with torch.device("meta"):
        model = build(name, size)
    assert embedding_share(model) == pytest.approx(MODELS[name].share, abs=0.01)


@pytest.mark.parametrize(
    ("name", "millions"), [("gnmt", 193.8), ("transformer", 279.9), ("bert", 109.5), ("lm", 831.4)]
)
def test_paper_sizes_are_as_documented(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = build(name, "paper")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("arguments", [{}, {"optimizer": "sgd", "sparse": True}, {"sparse": True}])
def test_two_steps_of_plain_training(name: str, arguments: dict[str, Any]) -> None:
    """Every parameter is trained: of a table the rows that were looked up move, of the rest some element does."""
    state, losses = fit(name, "auto", 1, 2, **arguments)
    assert len(losses) == 2 and all(torch.tensor(losses).isfinite())
    torch.manual_seed(1)  # as `fit` has it
    model, spec = tiny(name, **arguments)
    for key, start in model.named_parameters():
        moved = (state[key] - start.double()).abs() > 1e-12
        assert moved.any(), key
        assert not moved.all() or key.removesuffix(".weight") not in spec.lookups, key
    assert spec.lookups.keys() == {n for n, m in model.named_modules() if isinstance(m, nn.Embedding)}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_touches_the_specified_rows_only(name: str) -> None:
    """The look-ups that the specification names are all there are: a look-ahead made of it is right."""
    model, spec = tiny(name, sparse=True)
    batch = make_batch(spec, Zipf(words_of(spec), 1.0), 0, 0, 0)
    quiet(model).training_step(batch, 0).backward()
    for table, keys in spec.lookups.items():
        grad = model.get_submodule(table).weight.grad
        expected = torch.cat([batch[k].flatten() for k in keys]).unique()
        assert torch.equal(grad.coalesce().indices().flatten(), expected)


@pytest.mark.parametrize("name", MODELS)
def test_arguments_reach_the_model(name: str) -> None:
    model = build(name, vocabulary=50, dim=8, sparse=True, optimizer="sgd", lr=0.5)
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    assert all(t.weight.shape == (50, 8) and t.sparse for t in tables)
    (group,) = model.configure_optimizers().param_groups
    assert group["lr"] == 0.5
    with pytest.raises(ValueError, match="HINT"):
        build(name, vocabulary=50, dim=8, sparse=True, optimizer="adam")


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'gnmt'"):
        build("rnn")
    with pytest.raises(ValueError, match="'paper'"):
        batch_spec("lm", "large")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'adagrad'"):
        build("gnmt", vocabulary=50, dim=8, optimizer="rmsprop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="even"):
        GNMT(50, 8, layers=5)


def test_tied_bert_shares_one_parameter() -> None:
    """Counted once as an embedding, and the full softmax gives every row a gradient."""
    model, spec = tiny("bert", decoder="tied")
    assert isinstance(model, Bert) and model.tied is not None
    assert model.tied.weight is model.embedding.weight
    untied, _ = tiny("bert")
    assert embedding_share(model) == embedding_share(untied)
    quiet(model).training_step(make_batch(spec, Zipf(60, 1.0), 0, 0, 0), 0).backward()
    assert model.embedding.weight.grad.abs().sum(1).all()
    with pytest.raises(ValueError, match="lookup"):
        Bert(50, 8, decoder="tied", sparse=True)


def test_decoders_do_not_look_ahead() -> None:
    """A later target word changes no earlier score."""
    for name in ("gnmt", "transformer"):
        model = tiny(name)[0].eval()
        source, target = torch.arange(5)[None], torch.arange(10, 15)[None]
        changed = target.clone()
        changed[0, 3] = 40
        with torch.no_grad():
            one, other = model(source, target), model(source, changed)
            moved = model(source + 1, target)
        torch.testing.assert_close(one[:, :3], other[:, :3])
        assert not torch.allclose(one[:, 3:], other[:, 3:])
        assert not torch.allclose(one, moved)
    assert CausalDecoderLayer(8, 2, 16, batch_first=True)(torch.ones(1, 3, 8), torch.ones(1, 2, 8)).shape == (1, 3, 8)


def test_positions_differ_and_are_bounded() -> None:
    places = sinusoids(50, 7, torch.ones((), dtype=torch.float64))
    assert places.shape == (50, 7) and places.abs().max() <= 1
    assert torch.cdist(places, places).fill_diagonal_(1).min() > 1e-3
    with pytest.raises(ValueError, match="max_length=4"):
        Bert(50, 8, max_length=4)(torch.zeros(1, 5, 8))
