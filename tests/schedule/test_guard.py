"""Gradients that no synchronised backward pass has brought are noticed before they do harm."""

from __future__ import annotations

import torch
from torch import nn

from lightning_embrace.schedule.guard import GradientGuard


def _setting():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    guard = GradientGuard({"a": a, "b": b})
    guard.watch()
    return a, b, guard, torch.optim.SGD([a]), torch.optim.SGD([b])


def test_names_what_came_alone():
    """Only the optimizer whose parameters are concerned hears of it."""
    a, _, guard, of_a, of_b = _setting()
    (a * 2).sum().backward()
    assert guard.alone(of_a) == ["a"]
    assert guard.alone(of_b) == []


def test_a_synchronised_pass_takes_all_along():
    """It averages whatever is in ``grad``, so that earlier passes count as synchronised too."""
    a, _, guard, of_a, _ = _setting()
    (a * 2).sum().backward()
    guard.expect()
    (a * 3).sum().backward()
    guard.arrived(synchronised=True)
    assert guard.alone(of_a) == []


def test_accumulation_is_expected():
    """Passes whose exchange is put off do not count; nor does what was zeroed since."""
    a, b, guard, of_a, of_b = _setting()
    guard.expect()
    (a * 2).sum().backward()
    guard.arrived(synchronised=False)
    assert guard.alone(of_a) == []
    (b * 2).sum().backward()
    of_b.zero_grad()
    assert guard.alone(of_b) == []


def test_thawed_later_and_let_go():
    """A parameter is watched from when it is trained; afterwards nothing is left on it."""
    a = nn.Parameter(torch.ones(2), requires_grad=False)
    guard = GradientGuard({"a": a})
    guard.watch()
    a.requires_grad_()
    guard.watch()
    (a * 2).sum().backward()
    assert guard.alone(torch.optim.SGD([a])) == ["a"]
    guard.remove_hooks()
    assert not a._post_accumulate_grad_hooks
