"""Times that are joined, cut and laid out in rows."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lightning_embrace.monitor.intervals import Interval, common, length, pack, union

TIMES = st.integers(0, 30)
INTERVALS = st.lists(st.tuples(TIMES, TIMES).map(lambda pair: (min(pair), max(pair))), max_size=12)


def instants(intervals: list[Interval]) -> set[int]:
    """The unit intervals covered: what the arithmetic is checked against."""
    return {t for begin, end in intervals for t in range(begin, end)}


@given(INTERVALS)
def test_a_union_covers_the_same_time_in_separate_pieces(intervals: list[Interval]) -> None:
    joined = union(intervals)
    assert instants(joined) == instants(intervals)
    assert all(end < begin for (_, end), (begin, _) in pairwise(joined))
    assert length(intervals) == len(instants(intervals))


@given(INTERVALS, INTERVALS)
def test_what_two_have_in_common(left: list[Interval], right: list[Interval]) -> None:
    assert instants(common(left, right)) == instants(left) & instants(right)


@given(INTERVALS)
def test_a_row_never_shows_one_exchange_over_another(intervals: list[Interval]) -> None:
    """A viewer drops or misdraws spans of one thread that overlap."""
    rows = pack(intervals)
    for row in set(rows):
        assert_disjoint_or_nested([i for i, r in zip(intervals, rows) if r == row], nested=False)


@given(INTERVALS.map(lambda intervals: [(b, e) for b, e in intervals if b < e]))
def test_there_are_no_more_rows_than_needed(intervals: list[Interval]) -> None:
    rows = pack(intervals)
    at_once = max((sum(b <= t < e for b, e in intervals) for t in instants(intervals)), default=0)
    assert len(set(rows)) == at_once
    assert sorted(set(rows)) == list(range(at_once))


@given(INTERVALS)
def test_nested_spans_share_a_row_and_others_do_not(intervals: list[Interval]) -> None:
    rows = pack(intervals, nested=True)
    for row in set(rows):
        assert_disjoint_or_nested([i for i, r in zip(intervals, rows) if r == row], nested=True)


def test_a_call_inside_a_call_needs_no_second_row() -> None:
    assert pack([(0, 10), (2, 5), (3, 4), (6, 10)], nested=True) == [0, 0, 0, 0]
    assert pack([(0, 10), (2, 5)]) == [0, 1]
    assert pack([(0, 10), (5, 12)], nested=True) == [0, 1]


def assert_disjoint_or_nested(intervals: list[Interval], nested: bool) -> None:
    for n, (b, e) in enumerate(intervals):
        for begin, end in intervals[:n]:
            inside = nested and ((b <= begin and end <= e) or (begin <= b and e <= end))
            assert e <= begin or end <= b or inside
