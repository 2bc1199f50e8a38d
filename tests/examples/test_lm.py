"""The language model alone, on one process and without any strategy."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from examples.data.sampling import log_inclusion
from examples.data.text import Collate, Windows
from examples.models.lm import LanguageModel

V = 30


def batch(negatives: int) -> dict[str, torch.Tensor]:
    windows = Windows(torch.arange(60) % V, length=4)
    return Collate(V, negatives)([windows[i] for i in range(5)])


def test_sampled_softmax_with_every_word_is_the_full_one() -> None:
    model = LanguageModel(V, dim=8, hidden=6)
    # So many draws that every word is a candidate, with a probability so close to one that it corrects nothing.
    data = batch(negatives=20_000)
    assert len(data["negatives"]) == V
    assert log_inclusion(torch.arange(V), V, 20_000).abs().max() < 1e-6
    states = model(data["inputs"])
    full = F.cross_entropy(model._all_logits(states).flatten(0, 1), data["targets"].flatten())
    torch.testing.assert_close(model._sampled_loss(states, data), full)


def test_sampled_softmax_touches_candidates_only() -> None:
    model = LanguageModel(V, dim=8, hidden=6, sparse=True)
    data = batch(negatives=4)
    model._sampled_loss(model(data["inputs"]), data).backward()
    assert isinstance(model.output, nn.Embedding)
    grad = model.output.weight.grad
    assert grad is not None
    touched = grad.coalesce().indices().flatten().tolist()
    assert touched == sorted({*data["negatives"].tolist(), *data["targets"].flatten().tolist()})


@pytest.mark.parametrize(
    ("hidden", "projection", "recurrent"), [(4, nn.Linear, 0), (8, nn.Identity, 0), (12, nn.Identity, 8)]
)
def test_states_have_the_width_of_the_tables(hidden: int, projection: type[nn.Module], recurrent: int) -> None:
    model = LanguageModel(V, dim=8, hidden=hidden, layers=2)
    assert isinstance(model.project, projection)
    assert model.lstm.proj_size == recurrent
    assert model(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 8)


def test_full_softmax_starts_near_the_uniform_distribution() -> None:
    model = LanguageModel(V, dim=8, hidden=6, softmax="full")
    data = batch(negatives=0)
    logits = model._all_logits(model(data["inputs"]))
    loss = F.cross_entropy(logits.flatten(0, 1), data["targets"].flatten())
    assert loss.item() == pytest.approx(math.log(V), abs=0.5)


def test_adam_refuses_sparse_tables() -> None:
    with pytest.raises(ValueError, match="HINT"):
        LanguageModel(V, sparse=True, optimizer="adam")
    assert isinstance(LanguageModel(V, sparse=True).configure_optimizers(), torch.optim.Adagrad)
    assert isinstance(LanguageModel(V).configure_optimizers(), torch.optim.Adam)


def test_softmax_is_checked() -> None:
    with pytest.raises(ValueError, match="hierarchical"):
        LanguageModel(V, softmax="hierarchical")  # type: ignore[arg-type]
