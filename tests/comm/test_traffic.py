"""What is counted, and what counts as training."""

from __future__ import annotations

import pytest

from lightning_embrace.comm.traffic import Traffic, ring_bytes


def test_kinds_are_summed_apart() -> None:
    traffic = Traffic()
    traffic.add("rows", 10, 20)
    traffic.add("rows", 1, 2)
    traffic.add("ids", 5, 6)
    assert traffic.sent == {"rows": 11, "ids": 5}
    assert traffic.received == {"rows": 22, "ids": 6}
    assert traffic.calls == {"rows": 2, "ids": 1}
    assert traffic.total_sent() == 16


def test_what_belongs_to_no_step_is_left_out() -> None:
    """Initial weights, checkpoints and validation must not make a training step look expensive."""
    traffic = Traffic()
    for kind in ("setup", "state", "served"):
        traffic.add(kind, 1000, 1000)
    traffic.add("grads", 8, 8)
    traffic.steps = 4
    assert traffic.total_sent() == 8
    assert traffic.per_step() == {"grads": 2.0}


def test_per_step_is_empty_before_the_first_step() -> None:
    traffic = Traffic()
    traffic.add("rows", 1, 1)
    assert traffic.per_step() == {}


def test_reset_starts_anew() -> None:
    traffic = Traffic()
    traffic.add("rows", 1, 1)
    traffic.steps = 1
    traffic.reset()
    assert (traffic.sent, traffic.received, traffic.calls, traffic.steps) == ({}, {}, {}, 0)


@pytest.mark.parametrize(("payload", "world_size", "sent"), [(100, 1, 0), (100, 2, 100), (99, 3, 132), (100, 4, 150)])
def test_a_ring_sends_the_payload_almost_twice(payload: int, world_size: int, sent: int) -> None:
    assert ring_bytes(payload, world_size) == sent
