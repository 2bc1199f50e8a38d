"""Look-ups of nn.Embedding on several ranks: numbers of N-rank ddp, and no row fetched twice."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.tables.scripts import Scripted, check, look

V = 9


def _make(optimizer: str, columns: int, **options) -> functools.partial:
    return functools.partial(Scripted, optimizer, t=functools.partial(nn.Embedding, V, columns, **options))


@pytest.mark.parametrize(
    ("world_size", "columns"),
    [(1, 3), (2, 1), (2, 5), (3, 1), (3, 2), (3, 7)],
)
def test_any_width(ranks, world_size, columns):
    """D not divisible by N, D < N (some ranks own no column), one rank."""
    data = [[[look("t", [[r, 2, 2], [r + step, 5, 0]])] for r in range(world_size)] for step in range(4)]
    check(ranks, _make("adam", columns), data)


@pytest.mark.parametrize("padding", [3, -1])
@pytest.mark.parametrize(("sparse", "optimizer"), [(False, "adamw"), (True, "adagrad"), (True, "sparseadam")])
def test_padding(ranks, padding, sparse, optimizer):
    """A padding row with content is looked up as it is and never receives a gradient; negative counts from the end.

    One rank sees padding only: under SparseAdam its row must not even count as touched.
    """
    place = padding % V
    data = [[[look("t", [[place, 1], [step, place]])], [look("t", [place, place])]] for step in range(5)]
    ours, plain = check(ranks, _make(optimizer, 5, sparse=sparse, padding_idx=padding), data)
    if sparse:
        assert torch.equal(plain.state["t.weight"][place], torch.full((5,), 0.75, dtype=torch.float64))
    assert torch.equal(ours[0].state["t.weight"], ours[1].state["t.weight"])


@pytest.mark.parametrize("columns", [4, 1])
def test_scale_grad_by_freq(ranks, columns):
    """Frequencies count within one look-up of one rank, as under ddp."""
    data = [
        [
            [look("t", [1, 1, 1, step]), look("t", [1, 2])],
            [look("t", [[1, 2], [2, 2]])],
        ]
        for step in range(4)
    ]
    check(ranks, _make("momentum", columns, scale_grad_by_freq=True), data)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_shapes_of_ids(ranks, dtype):
    """No dimension, three dimensions, no ids; both integer types."""
    shapes = [torch.tensor(4), torch.tensor([[[1, 4], [4, 0]]]), torch.empty(2, 0), torch.tensor([4])]
    data = [[[look("t", ids.to(dtype)) for ids in shapes], [look("t", shapes[k].to(dtype))]] for k in range(4)]
    check(ranks, _make("adam", 3), data)


@pytest.mark.parametrize(("sparse", "optimizer"), [(False, "adam"), (True, "sparseadam")])
def test_empty_batches(ranks, sparse, optimizer):
    """An empty batch on one rank, then on all, then on none: an optimizer with a gradient of no rows still steps."""
    some, none = [look("t", [[1, 2, 1]])], [look("t", torch.empty(0, 3, dtype=torch.int64))]
    data = [[some, some], [some, none], [none, some], [none, none], [some, some]]
    check(ranks, _make(optimizer, 5, sparse=sparse), data)


@pytest.mark.parametrize(("sparse", "optimizer"), [(False, "adamw"), (True, "sparseadam")])
def test_unused(ranks, sparse, optimizer):
    """Unused on one rank: the others' gradient counts. Unused on all: ``grad`` stays None, AdamW must not decay it."""
    used, not_used = [look("t", [1, 2])], []
    data = [[used, not_used], [not_used, not_used], [not_used, used], [not_used, not_used], [used, used]]
    check(ranks, _make(optimizer, 5, sparse=sparse), data)


@pytest.mark.parametrize(("sparse", "optimizer"), [(False, "adam"), (True, "sparseadam"), (True, "adagrad")])
def test_looked_up_in_vain(ranks, sparse, optimizer):
    """Rows whose values do not reach the loss, or were read under no_grad, do not count as touched.

    SparseAdam and row-wise Adagrad would move them otherwise: rows 6, 7 and 8 stay as they were.
    """
    data = [
        [
            [look("t", [1, 6], used=False), look("t", [1, 2])],
            [look("t", [7, 2], grad=False), look("t", [2, 3]), look("t", [8], used=False)],
        ],
        [[look("t", [1, 2])], [look("t", [7, 8], used=False)]],
        [[look("t", [6], grad=False)], [look("t", [2])]],
    ]
    check(ranks, _make(optimizer, 5, sparse=sparse), data)


def _rows_sent(outcomes) -> list[int]:
    return [o.sent["rows"] for o in outcomes]


def test_a_row_is_fetched_once(ranks):
    """Several look-ups of one table in a step ask for a row once, and send one gradient row back."""
    data = [[[look("t", [1, 2, 3]), look("t", [[3, 2], [4, 2]]), look("t", [1, 4])], [look("t", [5])]]]
    (first, second), _ = check(ranks, _make("sgd", 6), data)
    # rank 0 needs 4 rows, rank 1 one: 3 of 6 columns come from the other, in fp64
    assert _rows_sent([first, second]) == [1 * 3 * 8, 4 * 3 * 8]
    assert [o.sent["grads"] for o in (first, second)] == [4 * 3 * 8, 1 * 3 * 8]


def test_different_numbers_of_lookups_and_tables(ranks):
    """Ranks look up different tables in the same round, and one looks up nothing."""
    tables = {name: functools.partial(nn.Embedding, V, d) for name, d in (("a", 4), ("b", 1), ("c", 6))}
    data = [
        [
            [look("a", [1, step]), look("b", [2]), look("c", [3])],
            [look("c", [1, 2]), look("a", [0])],
            [look("b", [4, step])] if step % 2 else [],
        ]
        for step in range(4)
    ]
    check(ranks, functools.partial(Scripted, "adam", **tables), data)


def test_tables_of_different_dtypes(ranks):
    """fp64 and fp32 tables in one model: each keeps its dtype on the wire."""
    tables = {
        "wide": functools.partial(nn.Embedding, V, 4, dtype=torch.float64),
        "single": functools.partial(_Kept, V, 5, dtype=torch.float32),
        "other": functools.partial(_Kept, V, 3, dtype=torch.float32, sparse=True),
    }
    calls = [look(name, [[1, 2], [2, 8]]) for name in tables]
    data = [[calls, calls[1:]], [calls[:2], []], [calls[2:], calls]]
    ours, plain = check(ranks, functools.partial(Scripted, "sgd", **tables), data, tolerance=1e-5)
    for key in ("wide.weight", "single.weight", "other.weight"):
        assert ours[0].state[key].dtype == plain.state[key].dtype
    torch.testing.assert_close(ours[0].state["wide.weight"], plain.state["wide.weight"], rtol=0, atol=1e-6)


class _Kept(nn.Embedding):
    """Keeps its dtype when the tests make the model fp64."""

    def double(self):
        return self

    def _apply(self, fn, recurse=True):
        probe = fn(torch.empty(0))
        return self if probe.dtype != torch.float32 else super()._apply(fn, recurse)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.2)])
@pytest.mark.parametrize(("sparse", "optimizer"), [(False, "adam"), (True, "sgd")])
def test_dtypes(ranks, dtype, tolerance, sparse, optimizer):
    """fp32 and bf16 tables follow plain training within their own rounding."""
    make = functools.partial(
        Scripted, optimizer, t=functools.partial(_Kept, V, 5, dtype=dtype, sparse=sparse, padding_idx=0)
    )
    data = [[[look("t", [[0, 1, 2], [step, 2, 2]])], [look("t", [1])]] for step in range(3)]
    ours, plain = check(ranks, make, data, tolerance)
    assert ours[0].state["t.weight"].dtype == dtype
    torch.testing.assert_close(ours[0].state["t.weight"], plain.state["t.weight"], rtol=0, atol=tolerance / 10)
    # in each of 3 steps rank 0 asks for 3 rows, of which rank 1 owns 2 columns; they travel in the table's dtype
    assert ours[1].sent["rows"] == 3 * 3 * 2 * dtype.itemsize


def test_lookup_counts_differ_and_a_value_is_logged(ranks):
    """Regression: a rank that had looked up all it needed waited in ``self.log(sync_dist=True)``, where it could not
    answer the one whose look-ups were still to come, and both waited for ever. The scripted model reduces its loss in
    every step; here rank 1 looks up nothing before it does."""
    data = [[[look("t", [1]), look("t", [2]), look("t", [3])], []]] * 2
    check(ranks, _make("sgd", 4), data)


class Contrastive(Scripted):
    """Calls torch.distributed itself between and after its look-ups, as contrastive losses do."""

    def look_up(self, call):
        values = super().look_up(call)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(torch.ones(1))
        return values


def test_collectives_of_the_user(ranks):
    """Ranks with equal numbers of look-ups have equal rounds, whether or not the rows are there already.

    Regression: a rank whose second look-up found all rows of the first took no part in its round, went on to the
    model's all_reduce and left the other waiting for an answer.
    """
    data = [[[look("t", [1, 2]), look("t", [2, 1]), look("t", [])], [look("t", [3]), look("t", [4]), look("t", [5])]]]
    check(ranks, functools.partial(Contrastive, "sgd", t=functools.partial(nn.Embedding, V, 4)), data * 2)
