"""What gives way, and for how long at most."""

from __future__ import annotations

import threading
import time

from lightning_embrace.comm.urgent import Urgent


def waited(urgent: Urgent, seconds: float, rate: float) -> float:
    begun = time.monotonic()
    urgent.wait(seconds, rate)
    return time.monotonic() - begun


def test_nothing_is_waited_for_where_nothing_is_under_way() -> None:
    urgent = Urgent()
    urgent.add(lambda: True, 10**12)
    urgent.wait(1e6, 1.0)  # would not return


def test_it_ends_with_the_exchange() -> None:
    urgent, done = Urgent(), threading.Event()
    urgent.add(done.is_set, 10**12)
    threading.Timer(0.05, done.set).start()
    urgent.wait(1e6, 1.0)
    assert done.is_set()


def test_an_exchange_that_tells_of_its_end_is_not_looked_at_meanwhile() -> None:
    """Regression: a look every half millisecond took CPU from the gradients, on every rank, as long as rows were under
    way."""
    urgent, looks, tell = Urgent(), [], []

    def is_done() -> bool:  # as a work item, whose callbacks run a moment before
        looks.append(None)
        return False

    urgent.add(is_done, 10**12, tell.append)
    threading.Timer(0.05, lambda: tell[0]()).start()
    urgent.wait(1e6, 1.0)
    assert len(looks) <= 3


def test_an_end_that_was_told_before_anybody_waited() -> None:
    urgent = Urgent()
    urgent.add(lambda: False, 10**12, lambda call: call())
    urgent.wait(1e6, 1.0)  # would not return


def test_the_time_that_the_bytes_take_is_allowed_for() -> None:
    """Regression: 50 ms were given to exchanges that took half a second on a slow link, and the rest of the way dense
    gradients shared the link with what the next step waited for."""
    urgent = Urgent()
    urgent.add(lambda: False, 1_000_000)
    assert waited(urgent, 0.01, 1e7) >= 0.11
    assert waited(urgent, 0.01, 0.0) >= 0.01  # not known: bounded all the same


def test_a_small_exchange_is_given_no_time_for_its_bytes() -> None:
    """Regression: the rate of tiny messages is none of the link's. Half a second was kept back for a few rows, and with
    it, on all ranks, what one rank read between two steps."""
    urgent = Urgent()
    urgent.add(lambda: False, 60_000)
    assert waited(urgent, 0.01, 1e-3) < 0.4


def test_the_pause_is_bounded_whatever_the_rate() -> None:
    """Regression: a rank looked up a row outside of steps and waited for delayed gradients, which another one held back
    for rows that waited for the first. The pause itself made the wire look slow, and so itself longer."""
    urgent = Urgent()
    urgent.add(lambda: False, 10**12)
    urgent.wait(0.01, 1e-6)  # would not return
