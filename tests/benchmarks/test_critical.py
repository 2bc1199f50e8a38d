"""The bound that steps are held against: by hand, against the formula of the docs, and against schedules that exist."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.benchmarks.critical import StepWork, critical_path, stall

amounts = st.floats(0, 10)
blocks = st.lists(st.tuples(amounts, amounts, amounts), min_size=1, max_size=5)


def work(parts: list[tuple[float, float, float]], *rest: float) -> StepWork:
    """Of (forward, backward, dense) by block."""
    return StepWork(*zip(*parts), *rest)


@given(compute=amounts, prior=amounts, rest=amounts, free=amounts)
def test_without_dense_gradients_it_is_the_formula(compute: float, prior: float, rest: float, free: float) -> None:
    """p·T + max(C, (1 − p)·T), with T the time of all bytes and p·T that of prior gradients and rest rows."""
    one = StepWork([compute / 3], [compute * 2 / 3], [0.0], prior, rest, free)
    exposed = (prior + rest) / 2
    assert critical_path(one, 2.0) == pytest.approx(exposed + max(compute, free / 2))


def test_the_first_block_hides_behind_nothing() -> None:
    """Its gradient is there when backward ends and needed when forward begins; those of later blocks have company."""
    first, last = work([(1, 2, 4), (1, 2, 0)]), work([(1, 2, 0), (1, 2, 4)])
    assert stall(first, 1.0) == 4 and critical_path(first, 1.0) == 10
    assert stall(last, 1.0) == 1 and critical_path(last, 1.0) == 7


def test_a_step_is_no_shorter_than_its_bytes() -> None:
    """Delayed gradients and early rows may travel at any time, but must."""
    assert critical_path(work([(1, 2, 0)], 1, 1, 98), 1.0) == 100
    assert critical_path(work([(1, 2, 0)], 1, 1, 0), 1.0) == 5


@given(parts=blocks, prior=amounts, rest=amounts, free=amounts)
def test_between_the_bound_without_dependencies_and_waiting_for_everything(
    parts: list[tuple[float, float, float]], prior: float, rest: float, free: float
) -> None:
    """max(C, T) cannot be beaten, and C + T is always possible."""
    made = work(parts, prior, rest, free)
    transfer = made.bytes / 3
    path = critical_path(made, 3.0)
    assert max(made.compute, transfer) <= path + 1e-9
    assert path <= made.compute + transfer + 1e-9


@given(parts=blocks, prior=amounts, rest=amounts, free=amounts)
def test_no_schedule_of_forward_order_beats_it(
    parts: list[tuple[float, float, float]], prior: float, rest: float, free: float
) -> None:
    """Backward, then everything urgent in the order of need with forward beside it: a schedule, so never faster."""
    made = work(parts, prior, rest, free)
    link = sum(made.backward) + prior + rest
    compute = link
    for forward, dense in zip(made.forward, made.dense):
        link += dense
        compute = max(compute, link) + forward
    assert critical_path(made, 1.0) <= max(compute, link) + free + 1e-9


def test_an_unshaped_link_leaves_compute() -> None:
    """Nothing is known of its bandwidth."""
    assert critical_path(work([(1, 2, 5)], 1, 1, 1), 0) == 3


def test_every_block_has_three_values() -> None:
    """A missing one would be left out without a word."""
    with pytest.raises(ValueError, match="1, 2 and 1"):
        StepWork([1.0], [1.0, 2.0], [1.0])
