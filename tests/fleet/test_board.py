"""How a fleet stands, in figures."""

from __future__ import annotations

import math

import pytest

from lightning_embrace.fleet.board import Board, DeviceRow, Scorer, Usage
from lightning_embrace.fleet.conductor import Live
from lightning_embrace.fleet.gantt import idle_shares
from lightning_embrace.fleet.lease import LeaseBook
from lightning_embrace.fleet.manifest import Entry
from lightning_embrace.fleet.pace import Progress


def book_of(*tasks: str) -> LeaseBook:
    book = LeaseBook(["d0", "d1"], "fifo")
    for task in tasks:
        book.join(task, math.inf, 0.0, now=0.0)
        book.ask(task, 0.0)
    return book


def test_usage_adds_up() -> None:
    """Shares are those of ended and running leases, however often one looks, and agree with the chart's."""
    book = book_of("a", "b")
    usage = Usage(book)
    assert usage.shares(5.0) == ({}, {"d0": 0.0, "d1": 0.0})
    book.due(10.0)
    assert usage.shares(10.0)[0] == {}
    for now in (12.0, 14.0):
        assert usage.shares(now) == ({"a": 0.5, "b": 0.5}, {"d0": 0.0, "d1": 0.0})
    book.give("a", 15.0)
    tasks, idle = usage.shares(20.0)
    assert tasks == {"a": 0.25, "b": 0.5} and idle == {"d0": 0.5, "d1": 0.0}
    book.ask("a", 20.0)
    book.due(20.0)
    book.leave("a", 22.0)
    book.leave("b", 22.0)
    tasks, idle = usage.shares(1000.0)
    assert tasks == pytest.approx({"a": 7 / 24, "b": 0.5})
    assert idle == pytest.approx({"d0": 5 / 12, "d1": 0.0})
    assert idle == pytest.approx(idle_shares(book.leases, book.devices))


def test_rows() -> None:
    """What tasks do, and what those have left that have ended."""
    book = book_of("computes", "waits too")
    book.join("waits", math.inf, 0.0, now=0.0)
    book.due(1.0)
    entries = {
        "old": Entry("finished", 1, {"val_loss": 1.23456}, None, 30, 0.5),
        "bad": Entry("failed", 1, {}, "E: no", 0, None),
        "computes": Entry("running", 1),
        "waits": Entry("running", 1),
        "starts": Entry("running", 2, {}, None, 7, 0.1),
        "last": Entry(),
    }
    live = {
        "computes": Live(None, 0.0, Progress(5, 2.5, 60.0), trains=True),
        "waits": Live(None, 0.0, Progress(0, None), trains=True, waits=True),
        "starts": Live(None, 0.0),
    }
    board: Board = Scorer(entries, live, book, now=1.0).board(3.0)
    assert board.seconds == 2.0
    found = [(r.name, r.now, r.step, r.loss, r.share, r.remaining, r.note) for r in board.tasks]
    assert found == [
        ("old", "finished", 30, 0.5, 0.0, None, "val_loss 1.235"),
        ("bad", "failed", None, None, 0.0, None, "E: no"),
        ("computes", "on d0", 5, 2.5, 0.5, 60.0, ""),
        ("waits", "waits for device", 0, None, 0.0, math.inf, ""),
        ("starts", "starts", 7, 0.1, 0.0, math.inf, ""),
        ("last", "waiting", None, None, 0.0, None, ""),
    ]
    assert board.devices == (DeviceRow("d0", "computes", 0.0), DeviceRow("d1", "waits too", 0.0))
