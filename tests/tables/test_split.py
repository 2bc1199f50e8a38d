"""Which rows travel when: pure sets, and a simulation in which reading a row too early is an error."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_embrace.tables.split import early_rows, prior_rows, without

ROWS = 12
IDS = st.sets(st.integers(0, ROWS - 1))
#: by step: what it looks up, and what was foretold of it: the truth ("right"), something else, or nothing
FORETOLD = st.one_of(st.just("right"), st.just("right"), st.none(), IDS)
STEPS = st.lists(st.tuples(IDS, FORETOLD), min_size=2, max_size=25)


def tensor(ids: set[int]) -> Tensor:
    return torch.tensor(sorted(ids), dtype=torch.int64)


@given(IDS, IDS)
def test_prior_and_delayed_partition_the_gradient(touched: set[int], following: set[int]) -> None:
    """Every row travels once; prior are those that somebody looks up next, and no others."""
    rows = tensor(touched)
    prior = prior_rows(rows, tensor(following))
    assert set(rows[prior].tolist()) == touched & following
    assert set(rows[~prior].tolist()) == touched - following


@given(IDS, IDS, IDS)
def test_early_and_the_rest_are_what_is_wanted(wanted: set[int], touched: set[int], delayed: set[int]) -> None:
    rows = tensor(wanted)
    early = rows[early_rows(rows, tensor(touched), tensor(delayed))]
    rest = without(rows, [early])
    assert set(early.tolist()) == wanted - touched - delayed
    assert set(early.tolist()) | set(rest.tolist()) == wanted
    assert not set(early.tolist()) & set(rest.tolist())


@given(IDS, st.lists(IDS, max_size=4))
def test_without_several(wanted: set[int], here: list[set[int]]) -> None:
    assert set(without(tensor(wanted), [tensor(h) for h in here]).tolist()) == wanted.difference(*here)


class Table:
    """Rows that count their updates; a row with an update under way must not be read."""

    def __init__(self) -> None:
        self.versions = [0] * ROWS
        self.under_way: set[int] = set()

    def apply(self, rows: Tensor) -> None:
        for row in rows.tolist():
            self.versions[row] += 1
        self.under_way -= set(rows.tolist())

    def read(self, rows: Tensor, due: list[int]) -> dict[int, int]:
        for row in rows.tolist():
            assert row not in self.under_way, f"row {row} was read between its gradient and its update"
            assert self.versions[row] == due[row], f"row {row} was read before its update"
        return {row: self.versions[row] for row in rows.tolist()}


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_no_row_is_read_between_its_gradient_and_its_update(
    steps: list[tuple[set[int], set[int] | str | None]],
) -> None:
    """Many steps as `foresight` has them, with delayed updates as late as can be: right before the next ones.

    Text has 6 to 10 % of rows that were touched at t − 1 and not at t: without `delayed` in `early_rows` it fails.
    """
    table, due = Table(), [0] * ROWS
    here: dict[int, int] = {}
    delayed = none = tensor(set())
    foretold = None
    for looked_up, after in zip((s for s, _ in steps), [*(_truth(*s) for s in steps[1:]), None]):
        # the step begins: what was foretold and did not come early is read without waiting for anything pending
        if foretold is not None:
            here |= table.read(without(tensor(foretold), [tensor(set(here))]), due)
        missing = without(tensor(looked_up), [tensor(set(here))])
        if len(missing):  # a round, which waits
            table.apply(delayed)
            here |= table.read(missing, due)
            pending = none
        else:
            pending = delayed
        for row in looked_up:
            assert here[row] == due[row], f"row {row} is stale"
        # backward: rows of the next step that this one leaves alone
        early = none
        if after is not None:
            rows = tensor(after)
            early = rows[early_rows(rows, tensor(set(here)), delayed)]
        here = table.read(early, due)
        # what is still pending is applied, then the new gradients are split
        table.apply(pending)
        gradient = tensor(looked_up)
        prior = prior_rows(gradient, tensor(after)) if after is not None else torch.ones_like(gradient).bool()
        for row in looked_up:
            due[row] += 1
        table.under_way = set(looked_up)
        table.apply(gradient[prior])
        delayed, foretold = gradient[~prior], after
    table.apply(delayed)
    assert table.versions == due


def _truth(looked_up: set[int], foretold: set[int] | str | None) -> set[int] | None:
    return looked_up if isinstance(foretold, str) else foretold
