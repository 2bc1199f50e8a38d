"""`grad_norm` gives every rank the norms of training in one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm as lightnings
from torch import nn
from torch.utils.data import DataLoader

from lightning_embrace.utilities import grad_norm
from tests.support.lifecycle import Whole, loader, make_model, make_strategy, make_trainer
from tests.support.models import batches, concatenated
from tests.support.ranks import Ranks

STEPS = 3
P = (1, 2.0, "inf")


class Norms(Whole):
    """Takes the norms of its gradients."""

    norm: Callable[..., Any] = staticmethod(grad_norm)

    def note(self) -> None:
        for p in P:
            norms = self.norm(self, p)
            self.log_dict(norms)
            self.evaluated.append({key: float(value) for key, value in norms.items()})
        self.evaluated.append({key: float(value) for key, value in self.norm(self.head, 2).items()})


class Logged(Norms):
    """Logs them where ``track_grad_norm`` did it."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note()


class AfterBackward(Norms):
    """In a hook that lets updates be late."""

    def on_after_backward(self) -> None:
        self.note()


class Lightnings(Logged):
    """The reference."""

    norm = staticmethod(lightnings)


def on_rank(world_size: int, columns: int, sparse: bool, cls: type[Norms], **strategy: Any) -> Any:
    """Runs in a worker."""
    model = make_model(columns, sparse, "adagrad", cls=cls)
    trainer = make_trainer(make_strategy("embrace", **strategy), world_size)
    trainer.fit(model, loader(STEPS, world_size=world_size))
    logged = {key: float(value) for key, value in trainer.logged_metrics.items() if "norm" in key}
    return model.evaluated, logged


@functools.cache
def in_one_process(world_size: int, columns: int) -> Any:
    """Dense gradients: Lightning's function knows no sparse ones, and Adagrad moves both alike."""
    model = make_model(columns, False, "adagrad", cls=Lightnings)
    data: Any = [concatenated(step) for step in batches(STEPS, world_size)]
    trainer = make_trainer("auto", 1)
    trainer.fit(model, DataLoader(data, batch_size=None))
    return model.evaluated, {key: float(value) for key, value in trainer.logged_metrics.items() if "norm" in key}


@pytest.mark.parametrize(
    ("world_size", "columns", "sparse", "cls", "strategy"),
    [
        (2, 5, False, Logged, {"schedule": "2d"}),
        (2, 5, True, Logged, {"schedule": "fifo"}),
        (3, 2, True, Logged, {"schedule": "2d"}),
        (3, 2, False, Logged, {"schedule": "fifo"}),
        (2, 5, True, AfterBackward, {"schedule": "2d"}),
        (2, 5, True, Logged, {"tables": ["bags"]}),
    ],
)
def test_equals_one_process(
    ranks: Callable[[int], Ranks], world_size: int, columns: int, sparse: bool, cls: type[Norms], strategy: Any
) -> None:
    """Of sharded tables, also where a rank owns no columns, of whole ones and of dense parameters; and as logged."""
    theirs, logged_there = in_one_process(world_size, columns)
    assert len(theirs) == STEPS * (len(P) + 1) and len(logged_there) == 5 * len(P)
    for ours, logged in ranks(world_size).run(on_rank, world_size, columns, sparse, cls, **strategy):
        for mine, others in zip(ours, theirs, strict=True):
            assert list(mine) == list(others)
            # Lightning puts the total together in fp32
            assert mine == pytest.approx({k: v for k, v in others.items()}, rel=1e-6, abs=1e-12)
            exact = {k: v for k, v in others.items() if not k.endswith("_total")}
            assert {k: mine[k] for k in exact} == pytest.approx(exact, rel=1e-10, abs=1e-12)
        assert logged == pytest.approx(logged_there, rel=1e-6)


@pytest.mark.parametrize("p", [1, 2, 3.5, "inf", math.inf])
def test_of_any_module(p: Any) -> None:
    """Where nothing is sharded it is Lightning's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    assert grad_norm(model, p) == lightnings(model, p) == {}
    model(torch.randn(5, 3)).pow(2).sum().backward()
    model[0].bias.grad = None
    ours, theirs = grad_norm(model, p, "."), lightnings(model, p, ".")
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        assert ours[key].shape == () and ours[key].dtype == torch.float32
        torch.testing.assert_close(ours[key], value, msg=key)


def test_of_half_precision() -> None:
    """In fp16 the norm would not fit."""
    parameter = nn.ParameterList([nn.Parameter(torch.zeros(100, 100, dtype=torch.float16))])
    parameter[0].grad = torch.full((100, 100), 60000.0, dtype=torch.float16)
    found = grad_norm(parameter, 2)
    assert found["grad_2.0_norm/0"].dtype == torch.float32
    assert float(found["grad_2.0_norm_total"]) == pytest.approx(6e6, rel=1e-3)


@pytest.mark.parametrize("p", [0, -1, math.nan])
def test_norms_that_are_none(p: float) -> None:
    with pytest.raises(ValueError, match="must be a positive number or 'inf'"):
        grad_norm(nn.Linear(1, 1), p)
