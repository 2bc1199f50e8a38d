"""Where each table lives and why."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrizations import weight_norm

from lightning_embrace.tables.find import MIN_SHARD_BYTES, find_tables


def _places(model: nn.Module, patterns="auto") -> dict[str, tuple[str, str]]:
    return {s.name: (s.place, s.reason) for s in find_tables(model, patterns)}


class _Two(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, **options)
        self.inner = nn.ModuleDict({"tags": nn.EmbeddingBag(5, 4)})


def test_auto_shards_what_is_large():
    """At the limit and above, a table is sharded; below, replicated."""
    rows = MIN_SHARD_BYTES // 16
    model = nn.ModuleDict({"large": nn.Embedding(rows, 4), "small": nn.Embedding(rows - 1, 4)})
    assert _places(model) == {
        "large": ("sharded", "large enough to pay"),
        "small": ("replicated", "smaller than 1 MiB: too small to pay"),
    }


def test_auto_counts_bytes():
    """The limit is in bytes: bf16 halves a table."""
    rows = MIN_SHARD_BYTES // 16
    assert _places(nn.Embedding(rows, 4, dtype=torch.bfloat16))[""][0] == "replicated"
    assert _places(nn.Embedding(rows // 2, 4, dtype=torch.float64))[""][0] == "sharded"


@pytest.mark.parametrize(
    ("patterns", "sharded"),
    [
        (["*"], {"words", "inner.tags"}),
        (["words"], {"words"}),
        (["inner.*"], {"inner.tags"}),
        (["*tags"], {"inner.tags"}),
        (["[wi]*"], {"words", "inner.tags"}),
        (["*", "!words"], {"inner.tags"}),
        (["!words", "*"], {"inner.tags"}),
        (["*", "!inner.*"], {"words"}),
        (["!words"], set()),
        ([], set()),
    ],
)
def test_patterns(patterns, sharded):
    """Patterns shard whatever the size, exclusions win wherever they stand, the reasons say so."""
    places = _places(_Two(), patterns)
    assert {name for name, (place, _) in places.items() if place == "sharded"} == sharded
    for name, (place, reason) in places.items():
        excluded = ("!words" if name == "words" else "!inner.*") in patterns
        expected = "excluded" if excluded else "matched" if place == "sharded" else "not matched"
        assert reason == f"{expected} by tables="


@pytest.mark.parametrize("pattern", ["word", "!tags", "Words"])
def test_pattern_without_match(pattern):
    """A pattern that matches nothing is a mistake; the message lists what there is."""
    with pytest.raises(ValueError, match=r"'" + pattern + r"' matches no embedding .* words, inner\.tags"):
        find_tables(_Two(), ["*", pattern])


def test_pattern_without_any_table():
    """A model without embeddings says so."""
    with pytest.raises(ValueError, match="It has: none"):
        find_tables(nn.Linear(2, 2), ["*"])
    assert find_tables(nn.Linear(2, 2), "auto") == []


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7)
        self.out.weight = self.words.weight


def test_tied_weight_is_dense():
    """Tying makes the gradient dense; patterns do not change that."""
    for patterns in ("auto", ["*"], ["words"]):
        assert _places(_Tied(), patterns) == {"words": ("dense", "tied to out.weight: its gradient is dense")}


def test_weight_registered_elsewhere_is_dense():
    """A second name of the Parameter may be used in any way; the message names it as ``named_parameters`` would."""
    model = _Two()
    model.copy = model.words.weight
    assert _places(model, ["*"])["words"] == ("dense", "tied to copy: its gradient is dense")


@pytest.mark.parametrize("patterns", ["auto", ["*"]])
def test_frozen(patterns):
    """A frozen table needs no exchange."""
    model = _Two()
    model.words.weight.requires_grad_(False)
    assert _places(model, patterns)["words"] == ("frozen", "frozen: nothing to synchronise")


def test_max_norm_stays_replicated():
    """max_norm writes rows while it looks them up; every rank needs whole rows for the norm."""
    places = _places(_Two(max_norm=1.0), ["*"])
    assert places["words"] == ("replicated", "max_norm changes rows while they are looked up")
    assert places["inner.tags"][0] == "sharded"


def test_parametrised_weight_is_no_table():
    """The weight is computed; its originals are ordinary dense parameters. A pattern that names it explains that."""
    model = _Two()
    weight_norm(model.words)
    assert list(_places(model, ["*"])) == ["inner.tags"]
    with pytest.raises(
        ValueError, match=r"'words' matches no embedding .* Parametrised, so without a table to shard: words\."
    ):
        find_tables(model, ["words"])


def test_shared_weight_is_one_table():
    """Two modules with one Parameter are one table, matched by either name; excluded by either."""
    model = _Two()
    model.inner["tags"] = nn.EmbeddingBag(7, 4)
    model.inner["tags"].weight = model.words.weight
    for patterns in (["words"], ["inner.tags"]):
        (spec,) = find_tables(model, patterns)
        assert (spec.place, list(spec.modules)) == ("sharded", ["words", "inner.tags"])
    (spec,) = find_tables(model, ["words", "!inner.tags"])
    assert spec.place == "replicated"


def test_module_under_two_names():
    """One module registered twice is one table under both names: state dicts hold it twice, patterns may use either."""
    model = _Two()
    model.alias = model.words
    spec = find_tables(model, ["alias"])[0]
    assert (spec.name, spec.place) == ("words", "sharded")
    assert spec.modules == {"words": model.words, "alias": model.words}


def test_shared_weight_with_different_sparse_flags():
    """One Parameter cannot have a sparse and a dense gradient."""
    model = _Two()
    model.inner["tags"] = nn.EmbeddingBag(7, 4, sparse=True)
    model.inner["tags"].weight = model.words.weight
    with pytest.raises(ValueError, match=r"'words' is shared by words, inner\.tags.*Give them the same value"):
        find_tables(model, "auto")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Embedding(5, 4, sparse=True, scale_grad_by_freq=True), "scale_grad_by_freq is not supported with sparse"),
        (nn.EmbeddingBag(5, 4, sparse=True, scale_grad_by_freq=True), "scale_grad_by_freq is not supported with"),
        (nn.EmbeddingBag(5, 4, sparse=True, mode="max"), "mode='max' is not supported with sparse=True"),
        (nn.EmbeddingBag(5, 4, scale_grad_by_freq=True, mode="max"), "'max' is not supported with scale_grad_by_freq"),
    ],
)
def test_refuses_what_torch_refuses(module, message):
    """torch raises in the first forward or backward pass of such a table, wherever it lives; so do we, before it."""
    with pytest.raises((RuntimeError, ValueError), match="not support"):
        module(torch.zeros(2, 2, dtype=torch.int64)).sum().backward()
    for patterns in ("auto", ["*"]):
        with pytest.raises(ValueError, match=message) as raised:
            find_tables(nn.ModuleDict({"table": module}), patterns)
        assert "'table'" in str(raised.value)


def test_refuses_uninitialised():
    """An uninitialised weight has no shape to shard."""
    model = _Two()
    model.words.weight = UninitializedParameter()
    with pytest.raises(ValueError, match="'words' is not initialised"):
        find_tables(model, "auto")


def test_spec():
    """What the plan prints is known: V, D, bytes and the sparse flag."""
    (spec, _) = find_tables(_Two(sparse=True, dtype=torch.float64), "auto")
    assert (spec.name, spec.shape, spec.nbytes, spec.sparse) == ("words", (7, 4), 7 * 4 * 8, True)
