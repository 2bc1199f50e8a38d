"""Bytes of what operations make, while it lives."""

from __future__ import annotations

import torch

from lightning_embrace.hydra.live import Live

SIZE = 4000


def test_what_lives_is_counted_and_what_died_is_not() -> None:
    """Two at a time at most, of three that are made; views and changes in place take nothing."""
    given = torch.ones(1000)
    with Live() as live:
        given.mul_(2)
        view = given.view(10, 100).t()
        first = view + 1
        second = first * 2
        assert live.now == 2 * SIZE
        del first
        assert live.now == SIZE
        second = second.exp().log_()
    assert live.now == SIZE and live.peak == 2 * SIZE
    del second
    assert live.now == 0


def test_small_ones_and_older_ones_do_not_count() -> None:
    older = torch.ones(1000)
    with Live(least=100) as live:
        kept = [torch.ones(3), older.add_(1), older[:10]]
    assert live.peak == 0 and len(kept) == 3


def test_within_backward() -> None:
    """The gradient, and what is made on the way to it."""
    leaf = torch.ones(1000, requires_grad=True)
    with Live() as live:
        (leaf.exp() * 3).sum().backward()
    assert leaf.grad is not None and live.now == SIZE and live.peak >= 3 * SIZE
