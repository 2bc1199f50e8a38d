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


def test_the_time_that_the_bytes_take_is_allowed_for() -> None:
    """Regression: 50 ms were given to exchanges that took half a second on a slow link, and the rest of the way dense
    gradients shared the link with what the next step waited for."""
    urgent = Urgent()
    urgent.add(lambda: False, 1000)
    assert waited(urgent, 0.01, 10_000.0) >= 0.11
    assert waited(urgent, 0.01, 0.0) >= 0.01  # not known: bounded all the same


def test_the_pause_is_bounded_whatever_the_rate() -> None:
    """Regression: a rank looked up a row outside of steps and waited for delayed gradients, which another one held back
    for rows that waited for the first. The pause itself made the wire look slow, and so itself longer."""
    urgent = Urgent()
    urgent.add(lambda: False, 10**12)
    urgent.wait(0.01, 1e-6)  # would not return
