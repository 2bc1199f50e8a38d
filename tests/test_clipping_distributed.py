"""Clipping under the Trainer equals ddp's, with tables of which each rank holds some columns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.plugins.precision import Precision
from torch.utils.data import DataLoader

from tests.support.lifecycle import Whole, assert_same, loader, make_model, make_strategy, make_trainer, results
from tests.support.models import batches, concatenated
from tests.support.ranks import Ranks

DATA = [concatenated(step) for step in batches(2, 2)]


class OwnNorm(Whole):
    """Clips by another norm, as the documentation of Lightning has it."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")


def clip(strategy: str, algorithm: str | None, sparse: bool = False, cls: Any = Whole, world_size: int = 2) -> Any:
    """Runs in a worker. Under ddp a sparse table would make torch's clipping raise, so its gradient is dense there."""
    model = make_model(5, sparse and strategy == "embrace", "adagrad", cls=cls)
    # a model that clips by itself forbids the Trainer's own argument
    clipping = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm} if cls is Whole else {}
    trainer = make_trainer(make_strategy(strategy), world_size, **clipping)
    trainer.fit(model, loader(3, world_size=world_size))
    assert not vars(trainer.precision_plugin), "the plugin is the user's again"
    return results(model, trainer)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", ["norm", "value", None])
def test_equals_ddp(ranks: Callable[[int], Ranks], world_size: int, algorithm: str | None) -> None:
    """The norm is that of all columns, and what every rank has counts once."""
    run = functools.partial(ranks(world_size).run, world_size=world_size)
    assert_same(run(clip, "embrace", algorithm), run(clip, "ddp", algorithm))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_sparse_gradients(ranks: Callable[[int], Ranks], algorithm: str) -> None:
    """torch refuses to clip them; with Adagrad a sparse table moves as a dense one does."""
    expected = ranks(2).run(clip, "ddp", algorithm, True)
    assert_same(ranks(2).run(clip, "embrace", algorithm, True), expected)


class Recording(Precision):
    """A plugin with its own clipping is left alone."""

    asked: list[float] = []

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        self.asked.append(float(clip_val))


def test_a_plugins_own_clipping_is_left_alone() -> None:
    Recording.asked = []
    trainer = make_trainer(make_strategy("embrace"), 1, gradient_clip_val=0.5, plugins=[Recording()])
    trainer.fit(make_model(), DataLoader(DATA, batch_size=None))
    assert Recording.asked == [0.5] * 2


def test_an_overridden_hook(ranks: Callable[[int], Ranks]) -> None:
    """`configure_gradient_clipping` calls `clip_gradients`, as with ddp."""
    expected = ranks(2).run(clip, "ddp", None, False, OwnNorm)
    assert_same(ranks(2).run(clip, "embrace", None, False, OwnNorm), expected)
