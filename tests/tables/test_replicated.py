"""The choice between the two forms in which a replicated table's gradient travels."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_embrace.tables.replicated import dense_elements, rows_are_smaller

COUNTS = st.lists(st.integers(0, 300), min_size=2, max_size=5)


def test_few_rows_travel_as_rows_and_many_do_not() -> None:
    assert rows_are_smaller([3, 4], table_rows=100, columns=8, itemsize=4)
    assert not rows_are_smaller([100, 100], table_rows=100, columns=8, itemsize=4)
    assert rows_are_smaller([0, 0], table_rows=1, columns=1, itemsize=2)


def test_a_sparse_table_pays_for_its_flags() -> None:
    """The set of touched rows travels as one more column of the dense form, and only where it is needed."""
    assert dense_elements(10, 3, sparse=False) == 30
    assert dense_elements(10, 3, sparse=True) == 40
    assert not rows_are_smaller([8, 8], table_rows=9, columns=1, itemsize=4)
    assert rows_are_smaller([8, 8], table_rows=9, columns=1, itemsize=4, sparse=True)


@given(COUNTS, st.integers(1, 300), st.integers(1, 20), st.sampled_from([2, 4, 8]), st.booleans())
def test_the_choice_is_fewer_bytes(counts: list[int], rows: int, columns: int, itemsize: int, sparse: bool) -> None:
    """Over all ranks together: every row to every other rank, against a ring's 2·(N−1)/N of the whole for each rank."""
    others = len(counts) - 1
    as_rows = sum(others * count * (columns * itemsize + 4) for count in counts)
    as_dense = 2 * others * dense_elements(rows, columns, sparse) * itemsize
    assert rows_are_smaller(counts, rows, columns, itemsize, sparse) == (as_rows < as_dense)
