"""Optimizers tried on four small parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_embrace.hydra.trial import CoupledOptimizerError, Temporaries, states_of, temporaries_of


class Scaled(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        super().step()


class Counting(torch.optim.SGD):
    """Counts its steps in a group."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        super().step()


class ScheduleFree(torch.optim.Optimizer):
    """Weights each step by a sum that its group keeps."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["weight_sum"] += group["lr"] ** 2
            for parameter in group["params"]:
                state = self.state[parameter]
                z = state.setdefault("z", parameter.clone())
                z.sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(z, group["lr"] ** 2 / group["weight_sum"])


def tried(kind: Any, **settings: Any) -> list[str]:
    optimizer = kind([nn.Parameter(torch.zeros(2, 3))], **settings)
    return sorted(name for name, _ in states_of(optimizer, optimizer.param_groups[0], torch.float32))


@pytest.mark.parametrize(
    ("kind", "settings", "states"),
    [
        (torch.optim.SGD, {"lr": 0.1}, []),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, ["momentum_buffer"]),
        (torch.optim.Adam, {"amsgrad": True}, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (torch.optim.AdamW, {"lr": 0.0}, ["exp_avg", "exp_avg_sq"]),
        (torch.optim.Adagrad, {}, ["sum"]),
        (torch.optim.NAdam, {}, ["exp_avg", "exp_avg_sq"]),
        (torch.optim.ASGD, {}, ["ax"]),
        (torch.optim.Rprop, {}, ["prev", "step_size"]),
    ],
)
def test_elementwise(kind: Any, settings: dict[str, Any], states: list[str]) -> None:
    """Accepted, with what each keeps."""
    assert tried(kind, **settings) == states


@pytest.mark.parametrize("kind", [Scaled, Counting, ScheduleFree])
def test_coupled(kind: Any) -> None:
    """One parameter's step depends on others, or a group counts: refused."""
    with pytest.raises(CoupledOptimizerError, match=rf"{kind.__name__} moves a parameter otherwise"):
        tried(kind, lr=0.1)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_what_cannot_be_tried(kind: Any) -> None:
    """It needs a closure that it calls again and again, or sparse gradients."""
    with pytest.raises(CoupledOptimizerError, match=kind.__name__):
        tried(kind)


@pytest.mark.parametrize(
    ("kind", "settings", "first", "second"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 0, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, 1, 0),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, 1, 0),
        (torch.optim.AdamW, {}, 2, 1),
    ],
)
def test_what_a_step_takes(kind: Any, settings: dict[str, Any], first: int, second: int) -> None:
    """One parameter after the other: what those before the last one have taken is free, or all but its own."""
    optimizer = kind([nn.Parameter(torch.zeros(2, 3))], **settings)
    taken = temporaries_of(optimizer, optimizer.param_groups[0], torch.float32, torch.device("cpu"))
    assert taken == Temporaries(first, second, 0)
    assert taken.nbytes(size=100, together=1000) == 100 * (first + second)
    assert taken.nbytes(size=100, together=130) == 100 * first + 30 * second
    assert taken.nbytes(size=100, together=100) == 100 * first


def test_what_a_step_of_all_at_once_takes() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2, 3))], foreach=True)
    taken = temporaries_of(optimizer, optimizer.param_groups[0], torch.float32, torch.device("cpu"))
    assert taken.first >= 1 and taken.others >= 1
    assert taken.nbytes(size=100, together=1000) >= 1000
