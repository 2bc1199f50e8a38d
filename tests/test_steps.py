"""What is read of counters and spans at a step's end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_embrace.comm.traffic import Traffic
from lightning_embrace.monitor.timeline import Timeline
from lightning_embrace.steps import StepCost, StepReader

SECOND = 10**9


def session(**foresight: Any) -> Any:
    """As far as it is read."""
    table = SimpleNamespace(unique=0, looked_up=0)
    ahead = SimpleNamespace(counts={"prior": 3, "delayed": 1, "early": 2, "rest": 2}, planned=[0, 1], **foresight)
    return SimpleNamespace(step=0, tables=[table], foresight=ahead)


def test_counts_are_those_since_the_last_reading() -> None:
    """A fit may follow another, and a strategy counts on."""
    traffic, trained = Traffic(), session()
    traffic.add("rows", 100, 200)
    reader = StepReader(traffic, trained, None)
    traffic.add("rows", 10, 20)
    traffic.add("state", 1, 2)
    trained.tables[0].unique, trained.tables[0].looked_up = 3, 12
    first = reader.read()
    assert first.sent["rows"] == 10 and first.received["rows"] == 20 and first.foreseen == 2
    assert first.sent_in_steps == 10, "a checkpoint is no part of a step"
    assert (first.share("unique"), first.share("prior"), first.share("early")) == (0.25, 0.75, 0.5)
    second = reader.read()
    assert second.sent["rows"] == 0 and second.share("unique") is None


def test_without_look_ahead_there_are_no_such_rows() -> None:
    """A share of nothing is not 0."""
    trained = session()
    trained.foresight = None
    cost = StepReader(Traffic(), trained, None).read()
    assert cost.share("prior") is None and cost.share("early") is None and cost.exposed is None


@pytest.mark.parametrize("first", [0, 5])
def test_waiting_between_steps_counts_once_with_the_next(first: int) -> None:
    """It is known only after the step's reading. Steps that were not read come together."""
    timeline, trained = Timeline(0, 2), session()
    trained.step = first

    def wait(step: int, begin: int, seconds: int) -> None:
        timeline.at_step(step)
        timeline.waited("wait rows", begin * SECOND, (begin + seconds) * SECOND, group="sparse group")

    wait(first - 1, 0, 90)  # before the first reader
    reader = StepReader(Traffic(), trained, timeline)
    reader.read()
    wait(first, 100, 2)
    trained.step += 1
    assert reader.read().exposed == 2.0
    wait(first, 110, 1)  # the next batch is waited for
    wait(first + 1, 120, 4)
    trained.step += 1
    assert reader.read().exposed == 5.0
    wait(first + 2, 130, 1)
    wait(first + 3, 140, 1)
    trained.step += 2
    assert reader.read().exposed == 2.0
    assert reader.read().exposed == 0.0


def test_a_share_is_of_its_own_sort() -> None:
    """Prior rows are rows of gradients, early ones are rows of weights."""
    cost = StepCost({}, {}, {"unique": 1, "repeated": 0, "prior": 0, "delayed": 5})
    assert (cost.share("unique"), cost.share("prior"), cost.share("early")) == (1.0, 0.0, None)
