"""The counts that are printed beside every benchmark."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from examples.benchmarks.data import Zipf, words_of
from examples.benchmarks.token_statistics import TableStatistics, markdown, statistics, table_statistics
from examples.models.registry import MODELS, batch_spec


def ids(*steps: list[list[int]]) -> list[list[Tensor]]:
    return [[torch.tensor(rank, dtype=torch.int64) for rank in step] for step in steps]


def test_counts_by_hand() -> None:
    """Two ranks, three steps."""
    found = table_statistics(ids([[1, 1, 2], [2, 5]], [[1, 7], [9, 9]], [[5, 2], [7, 4]]))
    assert found.tokens == (3 + 2 + 2 + 2 + 2 + 2) / 6
    assert found.unique == (2 + 2 + 2 + 1 + 2 + 2) / 6
    assert found.union == (3 + 3 + 4) / 3
    # Of {1, 2} the next step has 1, of {2, 5} none; of {1, 7} it has 7, of {9} none.
    assert found.prior == 2 / 7
    # {2, 4, 5, 7}: 2 and 5 were there two steps before and not one step before.
    assert found.early == 2 / 4


def test_shares_without_neighbours() -> None:
    """A single step has nothing to compare with, two have no step before the last."""
    assert math.isnan(table_statistics(ids([[1]])).prior)
    two = table_statistics(ids([[1]], [[1]]))
    assert two.prior == 1.0 and math.isnan(two.early)


def test_a_rank_without_ids() -> None:
    found = table_statistics(ids([[], [1]], [[], []], [[1], [1]]))
    assert found.unique == 0.5 and found.prior == 0.0 and found.early == 1.0


@given(
    st.integers(1, 3).flatmap(
        lambda ranks: st.lists(
            st.lists(st.lists(st.integers(0, 8), max_size=6), min_size=ranks, max_size=ranks), min_size=3, max_size=5
        )
    )
)
def test_counts_equal_those_of_sets(steps: list[list[list[int]]]) -> None:
    """Against Python's sets."""
    found = table_statistics(ids(*steps))
    unions = [set().union(*step) for step in steps]
    prior = [(len(set(rank) & after), len(set(rank))) for step, after in zip(steps, unions[1:]) for rank in step]
    early = [(len((c & a) - b), len(c)) for a, b, c in zip(unions, unions[1:], unions[2:])]
    for share, parts in ((found.prior, prior), (found.early, early)):
        whole = sum(n for _, n in parts)
        assert math.isnan(share) if whole == 0 else share == pytest.approx(sum(k for k, _ in parts) / whole)
    assert found.union == pytest.approx(sum(map(len, unions)) / len(unions))


@pytest.mark.parametrize("name", MODELS)
def test_every_table_is_counted(name: str) -> None:
    spec = batch_spec(name, vocabulary=100, batch=2, length=6, negatives=10)
    found = statistics(spec, Zipf(words_of(spec), 1.0), ranks=2, steps=3)
    assert found.keys() == spec.lookups.keys()
    assert all(0 < s.unique <= s.tokens and s.unique <= s.union <= 2 * s.unique for s in found.values())


def test_table_is_markdown() -> None:
    text = markdown({"embedding": TableStatistics(1024, 310.4, 1000, 0.314, 0.0786)})
    head, rule, row = text.splitlines()
    assert head.count("|") == rule.count("|") == row.count("|") == 7
    assert row == "| embedding | 1,024 | 310 | 1,000 | 31% | 7.9% |"
