"""Look-ups of nn.EmbeddingBag on several ranks: numbers of N-rank ddp, pooled exactly when that is fewer bytes."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn

from tests.tables.scripts import Scripted, check, look

V = 12


def _make(optimizer: str, columns: int, **options) -> functools.partial:
    return functools.partial(Scripted, optimizer, t=functools.partial(nn.EmbeddingBag, V, columns, **options))


_LARGE = [[1, 2, 3, 4, 5, 6], [6, 7, 8, 9, 10, 0]]  # 2 bags, 11 rows: vectors are fewer
_SMALL = [[1, 1, 1], [1, 2, 2], [2, 2, 1]]  # 3 bags, 2 rows: rows are fewer


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(("sparse", "optimizer"), [(False, "adam"), (True, "adagrad"), (True, "sparseadam")])
def test_modes(ranks, mode, sparse, optimizer):
    """Every mode, large bags on one rank and small ones on the other, in turn and together."""
    if sparse and mode == "max":
        mode = "mean"  # torch has no sparse maximum; a second mean with padding instead
    padding = 2 if optimizer != "adagrad" else None
    data = [
        [[look("t", _LARGE)], [look("t", _SMALL)]],
        [[look("t", _SMALL), look("t", _LARGE)], []],
        [[look("t", _LARGE), look("t", _LARGE), look("t", [[2, 2]])], [look("t", [[2, 2], [2, 2]])]],
    ]
    check(ranks, _make(optimizer, 9, mode=mode, sparse=sparse, padding_idx=padding), data)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("last", [False, True])
def test_offsets(ranks, dtype, last):
    """Flat ids with offsets of either integer type, empty bags first, in the middle and last, no bags at all."""
    ids = torch.tensor([1, 2, 3, 4, 5, 5, 6], dtype=dtype)
    ends = [7] if last else []
    calls = [
        look("t", ids, [0, 0, 4, 4, 7, *ends]),
        look("t", ids[:0], [0, 0, *([0] if last else [])]),
        look("t", ids[:0], [0] if last else []),
        look("t", ids, [0, *ends]),
    ]
    data = [[calls, calls[1:2]], [calls[2:3], calls[2:3]], [calls[3:], calls[::-1]]]
    for mode in ("sum", "max"):
        check(ranks, _make("adam", 7, mode=mode, include_last_offset=last, padding_idx=5), data)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_scale_grad_by_freq(ranks, mode):
    """Frequencies count within one look-up: such bags travel as rows."""
    data = [[[look("t", _LARGE), look("t", _SMALL)], [look("t", _SMALL)]]] * 3
    ours, _ = check(ranks, _make("sgd", 8, mode=mode, scale_grad_by_freq=True), data)
    assert ours[1].sent["rows"] == 3 * 11 * 4 * 8  # rank 0 asks for all but row 11, the rows of both look-ups once


def test_weights_per_sample(ranks):
    """Fixed weights travel with the ids of pooled bags, 2-D and flat."""
    weights = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
    flat = look("t", torch.tensor(_LARGE).flatten(), [0, 5], weights=weights.flatten())
    data = [[[look("t", _LARGE, weights=weights)], [flat]], [[flat, flat], [look("t", _SMALL)]]]
    check(ranks, _make("adam", 16, mode="sum"), data)
    check(ranks, _make("adagrad", 3, mode="sum", sparse=True, padding_idx=6), data)


class Weighted(Scripted):
    """Trains a weight per id."""

    def __init__(self, optimizer: str, **tables) -> None:
        super().__init__(optimizer, **tables)
        self.importance = nn.Embedding(V, 1)

    def look_up(self, call):
        ids = call["ids"]
        return self.t(ids, per_sample_weights=self.importance(ids).squeeze(-1))


@pytest.mark.parametrize(("sparse", "optimizer"), [(False, "adam"), (True, "sgd")])
def test_trained_weights_per_sample(ranks, sparse, optimizer):
    """Their gradient needs whole rows: rows travel, and the table that gives the weights is trained right."""
    t = functools.partial(nn.EmbeddingBag, V, 6, mode="sum", sparse=sparse, padding_idx=3)
    data = [[[look("t", _LARGE)], [look("t", _SMALL), look("t", [[3, 3]])]], [[], [look("t", _LARGE)]]]
    check(ranks, functools.partial(Weighted, optimizer, t=t), data)


def _sent(outcomes, kind: str) -> list[int]:
    return [o.sent.get(kind, 0) for o in outcomes]


def test_pooled_is_chosen_when_fewer_bytes(ranks):
    """Rank 0 asks for 2 vectors instead of 11 rows, rank 1 for 2 rows instead of 3 vectors; counted exactly."""
    data = [[[look("t", _LARGE)], [look("t", _SMALL)]]]
    ours, _ = check(ranks, _make("sgd", 8, mode="mean"), data)
    half = 4 * 8  # 4 of 8 columns, fp64
    assert _sent(ours, "rows") == [2 * half, 2 * half]
    assert _sent(ours, "grads") == [2 * half, 2 * half]
    # 12 ids and the sizes of 2 bags; 2 ids
    assert _sent(ours, "ids") == [12 * 4 + 2 * 4, 2 * 4]


def test_pooled_without_backward(ranks):
    """Under no_grad nothing travels back, and ids and weights weigh twice as much against the vectors."""
    data = [[[look("t", _LARGE, grad=False), look("t", [[1, 2]])], []]]
    ours, _ = check(ranks, _make("sgd", 8, mode="sum"), data)
    assert _sent(ours, "rows") == [0, (2 + 1) * 4 * 8]
    assert _sent(ours, "grads") == [1 * 4 * 8, 0]


def test_rows_that_are_here_are_not_pooled(ranks):
    """After a look-up has fetched the rows, bags of the same ids cost nothing."""
    data = [[[look("t", [[i] for i in range(11)]), look("t", _LARGE)], []]]
    ours, _ = check(ranks, _make("sgd", 8, mode="sum"), data)
    assert _sent(ours, "rows") == [0, 11 * 4 * 8]
    assert _sent(ours, "grads") == [11 * 4 * 8, 0]


def test_equal_bags_travel_once(ranks):
    """Looked up again, the same bags have been answered already; their gradients are summed before they travel."""
    data = [[[look("t", _LARGE), look("t", _LARGE)], [look("t", _LARGE)]]]
    ours, _ = check(ranks, _make("sgd", 8, mode="sum"), data)
    assert _sent(ours, "rows") == [2 * 4 * 8, 2 * 4 * 8]
    assert _sent(ours, "grads") == [2 * 4 * 8, 2 * 4 * 8]


def test_maximum_travels_as_rows(ranks):
    """A maximum over columns could be pooled, but its gradient could not."""
    data = [[[look("t", _LARGE)], []]]
    ours, _ = check(ranks, _make("sgd", 8, mode="max"), data)
    assert _sent(ours, "rows") == [0, 11 * 4 * 8]


def test_more_pooled_lookups_than_bits(ranks):
    """A header field says which of 62 pooled requests have a gradient; what is more travels as rows."""
    pairs = itertools.islice(itertools.combinations(range(V), 4), 70)  # equal ones would count once
    calls = [look("t", [list(ids)]) for ids in pairs]
    check(ranks, _make("sgd", 64, mode="sum"), [[calls, calls[:3]], [calls[:1], []]])
