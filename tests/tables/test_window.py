"""The rows of a step and their gradients, against a dictionary."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lightning_embrace.tables.window import Window

COLUMNS = 2
_ids = st.lists(st.integers(0, 12), unique=True, max_size=8)


class WindowModel(RuleBasedStateMachine):
    """Fetches, look-ups and exchanges in any order keep the window equal to plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window(torch.empty(0, COLUMNS, dtype=torch.float64))
        self.rows: dict[int, float] = {}
        self.order: list[int] = []
        self.grads: dict[int, float] = {}
        self.used = False

    @rule(ids=_ids, value=st.integers(-9, 9))
    def fetch(self, ids: list[int], value: int) -> None:
        wanted = torch.tensor(ids, dtype=torch.int64)
        missing = self.window.missing(wanted)
        assert missing.tolist() == [i for i in ids if i not in self.rows]
        fresh = torch.stack([torch.full((len(missing),), value), missing.double()], dim=1).double()
        self.window.add(missing, fresh)
        for i in missing.tolist():
            self.rows[i] = value
            self.order.append(i)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), grad=st.integers(-5, 5), skip=st.booleans())
    def backward(self, data: st.DataObject, grad: int, skip: bool) -> None:
        ids = data.draw(st.lists(st.sampled_from(self.order), unique=True))
        positions = self.window.positions(torch.tensor(ids, dtype=torch.int64))
        keep = torch.ones(len(ids), dtype=torch.bool) if skip else None
        if keep is not None and ids:
            keep[0] = False  # as padding_idx
        self.window.accumulate(positions, torch.full((len(ids), COLUMNS), float(grad), dtype=torch.float64), keep)
        self.used = True
        for i in ids[1:] if skip else ids:
            self.grads[i] = self.grads.get(i, 0.0) + grad

    @rule()
    def take(self) -> None:
        if not self.used:
            assert not self.window.used and self.window.take_gradient() is None
            return
        touched, grads, pooled, bits = self.window.take_gradient()
        assert not pooled and bits == 0
        assert [i for i, t in zip(self.order, touched.tolist()) if t] == [i for i in self.order if i in self.grads]
        assert grads[:, 0].tolist() == [self.grads[i] for i in self.order if i in self.grads]
        self.grads, self.used = {}, False

    @invariant()
    def equal(self) -> None:
        assert len(self.window) == len(self.order)
        assert self.window.used == self.used
        if self.order:
            rows = self.window.rows_UD[self.window.positions(torch.tensor(self.order))]
            assert rows.tolist() == [[self.rows[i], float(i)] for i in self.order]


TestWindowModel = WindowModel.TestCase
TestWindowModel.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5)), max_size=6))
def test_pooled_gradients(steps):
    """Gradients of a pooled request add up; they are handed over in the order of the requests, once."""
    window = Window(torch.empty(0, COLUMNS))
    expected: dict[int, float] = {}
    for number, value in steps:
        window.accumulate_pooled(number, torch.full((1, COLUMNS), float(value)))
        expected[number] = expected.get(number, 0.0) + value
    assert window.used == bool(steps)
    if steps:
        taken = window.take_gradient()
        assert taken.pooled_bits == sum(1 << n for n in expected)
        assert [float(g[0, 0]) for g in taken.pooled] == [expected[n] for n in sorted(expected)]
    assert window.take_gradient() is None


def test_used_without_rows():
    """A backward pass without rows (an empty batch) counts as use: the optimizer must step, as under ddp."""
    window = Window(torch.empty(0, COLUMNS))
    assert not window.used
    window.accumulate(torch.empty(0, dtype=torch.int64), torch.empty(0, COLUMNS), None)
    assert window.used
    touched, grads, _, _ = window.take_gradient()
    assert touched.shape == (0,)
    assert grads.shape == (0, COLUMNS)
    assert not window.used
