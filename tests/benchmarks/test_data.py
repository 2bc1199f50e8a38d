"""The benchmark's batches: pure functions of (seed, rank, step) that fit their models."""

from __future__ import annotations

import gzip

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.benchmarks import data
from examples.benchmarks.data import StepBatches, Text, Zipf, looked_up, make_batch, make_source, read_text
from examples.models.registry import MODELS, batch_spec


def equal(a: data.Batch, b: data.Batch) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("exponent", [0.0, 1.1])
def test_a_batch_depends_on_seed_rank_and_step_alone(name: str, exponent: float) -> None:
    """Every peer sees the same batches, in whichever order it asks; ranks, steps and seeds see different ones."""
    spec = batch_spec(name, vocabulary=500, batch=3, length=8, negatives=20)
    batches = StepBatches(spec, make_source(spec, exponent), rank=1, steps=3, seed=7)
    backwards = [batches[t] for t in (2, 1, 0)][::-1]
    again = make_source(spec, exponent)
    for step, (one, other) in enumerate(zip(batches, backwards)):
        assert equal(one, other)
        assert equal(one, make_batch(spec, again, 7, 1, step))
    first = batches[0]
    assert not any(equal(first, make_batch(spec, again, *where)) for where in [(8, 1, 0), (7, 0, 0), (7, 1, 1)])


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_is_as_specified(name: str) -> None:
    """Shapes are equal on all ranks, ids are valid, and the special word is never a target."""
    spec = batch_spec(name, vocabulary=40, batch=3, length=8, negatives=20)
    special = spec.vocabulary - 1
    for rank in range(4):
        batch = make_batch(spec, Zipf(data.words_of(spec), 0.5), 0, rank, 0)
        for ids in looked_up(spec, batch).values():
            assert ids.min() >= 0 and ids.max() < spec.vocabulary
        if spec.task == "language":
            assert batch["inputs"].shape == batch["targets"].shape == batch["target_log_q"].shape == (3, 8)
            assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
        elif spec.task == "translation":
            assert batch["source"].shape == batch["target_inputs"].shape == batch["target_outputs"].shape == (3, 8)
            assert torch.equal(batch["target_inputs"][:, 1:], batch["target_outputs"][:, :-1])
            assert (batch["target_inputs"][:, 0] == special).all() and batch["target_outputs"].max() < special
        else:
            assert batch["inputs"].shape == (3, 8)
            assert batch["positions"].shape == batch["targets"].shape == batch["target_log_q"].shape == (4,)
            assert batch["positions"].unique().numel() == 4 and batch["targets"].max() < special
        assert (len(batch["negatives"]) == len(batch["negative_log_q"])) if spec.negatives else "negatives" not in batch


def test_masked_words_can_be_restored() -> None:
    """Only the masked places differ from the text, and most of them show the mask."""
    spec = batch_spec("bert", vocabulary=1000, batch=10, length=100)
    source = Zipf(999, 1.0)
    batch = make_batch(spec, source, 0, 0, 0)
    hidden = batch["inputs"].flatten()[batch["positions"]] == 999
    assert 0.7 < hidden.double().mean() < 0.9
    assert int((batch["inputs"] == 999).sum()) == int(hidden.sum())


@given(words=st.integers(1, 300), exponent=st.floats(0, 3), seed=st.integers(0, 100))
def test_zipf_ids_are_valid(words: int, exponent: float, seed: int) -> None:
    ids = Zipf(words, exponent).sequences(2, 50, torch.Generator().manual_seed(seed))
    assert ids.shape == (2, 50) and ids.min() >= 0 and ids.max() < words


def test_zipf_ids_have_the_stated_exponent() -> None:
    ids = Zipf(1000, 1.2).sequences(1, 200_000, torch.Generator().manual_seed(0))
    counts = torch.bincount(ids.flatten(), minlength=1000).double()
    expected = torch.arange(1, 1001, dtype=torch.float64).pow(-1.2)
    expected *= 200_000 / expected.sum()
    assert ((counts - expected).abs() < 5 * expected.sqrt() + 1).all()


def test_a_text_gives_its_own_stretches() -> None:
    """Most frequent word first; what does not fit the vocabulary is unknown."""
    text = Text.encode("a b a c a b d a", words=3)
    assert len(set(text.tokens.tolist())) == 3
    whole = text.tokens.tolist()
    for row in text.sequences(20, 3, torch.Generator().manual_seed(0)).tolist():
        assert any(whole[i : i + 3] == row for i in range(len(whole) - 2))
    with pytest.raises(ValueError, match="8 words"):
        text.sequences(1, 9, torch.Generator())


def test_an_encoded_text_can_be_kept(tmp_path) -> None:
    """Ranks load the ids that one process has made; a vocabulary they do not fit is refused."""
    spec = batch_spec("lm", vocabulary=200, batch=2, length=8)
    file = tmp_path / "tokens.pt"
    made = make_source(spec)
    made.save(file)
    kept = make_source(spec, text=str(file))
    assert kept.name == made.name and torch.equal(kept.tokens, made.tokens)
    assert equal(make_batch(spec, made, 0, 0, 0), make_batch(spec, kept, 0, 0, 0))
    with pytest.raises(ValueError, match="200 words"):
        make_source(batch_spec("lm", vocabulary=100), text=str(file))


def test_texts_are_read(tmp_path, monkeypatch) -> None:
    """Plain and compressed alike; a dictionary that is not installed says how to get it."""
    (tmp_path / "plain").write_text("één twee", encoding="utf-8")
    (tmp_path / "dict.dz").write_bytes(gzip.compress("één twee".encode()))
    assert read_text(str(tmp_path / "plain")) == read_text(str(tmp_path / "dict.dz")) == "één twee"
    monkeypatch.setattr(data, "GCIDE", tmp_path / "dict.dz")
    assert read_text("gcide") == "één twee"
    monkeypatch.setattr(data, "GCIDE", tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match="dict-gcide"):
        read_text("gcide")
