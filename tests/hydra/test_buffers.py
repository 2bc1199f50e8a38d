"""Buffers that a block changes."""

from __future__ import annotations

import torch
from torch import nn

from lightning_embrace.hydra.buffers import Buffers


class Body(nn.Module):
    """One buffer for each way to change it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fixed", torch.ones(2))
        self.inner = nn.Module()
        self.inner.register_buffer("added", torch.zeros(2))
        self.inner.register_buffer("replaced", torch.zeros(2))

    def forward(self) -> None:
        self.inner.added += 1
        for _ in range(2):  # the second new tensor may lie where the first old one has lain
            self.inner.replaced = self.inner.replaced + 1


def test_values_before_and_after() -> None:
    """Three runs; the first two are repeated as they were, and what came last stays, untouched."""
    block = Body()
    buffers = Buffers(block)
    changed = []
    for _ in range(3):
        buffers.before()
        block()
        changed.append(buffers.after())
    last = dict(block.inner._buffers)
    version = block.inner.added._version
    for run in (1, 0, 1):
        with buffers.as_before(changed[run]):
            assert block.inner.added.tolist() == [run] * 2 and block.inner.replaced.tolist() == [2 * run] * 2
            block()
        assert all(block.inner._buffers[n] is b for n, b in last.items())
    assert block.inner.added.tolist() == [3, 3] and block.inner.added._version == version
    assert buffers.nbytes == 3 * 2 * 4


def test_what_changes_outside_of_runs() -> None:
    block = Body()
    buffers = Buffers(block)
    buffers.before()
    block.fixed.fill_(5)
    buffers.before()
    block.fixed += 1
    [before] = buffers.after().values()
    assert before["fixed"].tolist() == [5, 5]


def test_batch_norm() -> None:
    """Running statistics count as changed together, though torch does not count all of their changes."""
    block = nn.BatchNorm1d(3)
    buffers = Buffers(block)
    buffers.before()
    block(torch.randn(4, 3))
    [before] = buffers.after().values()
    assert before["running_mean"].tolist() == [0.0] * 3 and before["running_var"].tolist() == [1.0] * 3
    block.eval()
    buffers.before()
    block(torch.randn(4, 3))
    assert buffers.after() == {}
