"""Clipping under the Trainer equals ddp's, with tables of which each rank holds some columns."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any, get_args

import pytest
from lightning.pytorch.plugins.precision import Precision
from torch.nn import utils
from torch.nn.utils import clip_grad, clip_grad_norm_
from torch.utils.data import DataLoader

from lightning_embrace.schedule.order import Name
from tests.support.lifecycle import Whole, assert_same, loader, make_model, make_strategy, make_trainer, results
from tests.support.models import batches, concatenated
from tests.support.ranks import Ranks

DATA = [concatenated(step) for step in batches(2, 2)]
BRIEF = timedelta(seconds=3)


class TorchsNorm(Whole):
    """Clips with torch's own function, by any norm, and keeps what it returned."""

    norm_type = 2.0

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        total = clip_grad_norm_(self.clipped(), 0.02, self.norm_type, error_if_nonfinite=True)
        again = utils.get_total_norm([p.grad for p in self.clipped()], self.norm_type)
        self.evaluated += [float(total), float(again)]

    def clipped(self) -> list[Any]:
        return list(self.parameters())


class Sum(TorchsNorm):
    norm_type = 1.0


class Cubes(TorchsNorm):
    norm_type = 3.0


class Largest(TorchsNorm):
    """Of the tables alone: one rank has it."""

    norm_type = math.inf

    def clipped(self) -> list[Any]:
        return [p for name, p in self.named_parameters() if not name.startswith("head")]


class AfterBackward(Whole):
    """Clips where no hook is given the optimizer: all that is late must be there."""

    def on_after_backward(self) -> None:
        self.evaluated.append(float(clip_grad_norm_(self.parameters(), 0.02)))


class OwnNorm(Whole):
    """Clips by another norm, as the documentation of Lightning has it."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")


def clip(
    strategy: str,
    algorithm: str | None,
    sparse: bool = False,
    cls: Any = Whole,
    world_size: int = 2,
    columns: int = 5,
    options: dict[str, Any] | None = None,
) -> Any:
    """Runs in a worker. Under ddp a sparse table would make torch's clipping raise, so its gradient is dense there."""
    torchs = clip_grad._get_total_norm, utils.get_total_norm
    model = make_model(columns, sparse and strategy == "embrace", "adagrad", cls=cls)
    # a model that clips by itself forbids the Trainer's own argument
    clipping = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm} if cls is Whole else {}
    trainer = make_trainer(make_strategy(strategy, **(options or {})), world_size, **clipping)
    trainer.fit(model, loader(3, world_size=world_size))
    assert not vars(trainer.precision_plugin), "the plugin is the user's again"
    assert torchs == (clip_grad._get_total_norm, utils.get_total_norm), "torch's functions are torch's again"
    return results(model, trainer)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", ["norm", "value", None])
def test_equals_ddp(ranks: Callable[[int], Ranks], world_size: int, algorithm: str | None) -> None:
    """The norm is that of all columns, and what every rank has counts once."""
    run = functools.partial(ranks(world_size).run, world_size=world_size)
    assert_same(run(clip, "embrace", algorithm), run(clip, "ddp", algorithm))


@pytest.mark.parametrize(
    ("algorithm", "schedule", "world_size", "columns"),
    [("norm", "2d", 2, 5), ("norm", "fifo", 3, 2), ("value", "fifo", 2, 5), ("value", "2d", 3, 2)],
)
def test_sparse_gradients(
    ranks: Callable[[int], Ranks], algorithm: str, schedule: str, world_size: int, columns: int
) -> None:
    """torch refuses to clip them; with Adagrad a sparse table moves as a dense one does."""
    run = functools.partial(ranks(world_size).run, world_size=world_size, columns=columns)
    expected = run(clip, "ddp", algorithm, True)
    assert_same(run(clip, "embrace", algorithm, True, options={"schedule": schedule}), expected)


@pytest.mark.matrix
@pytest.mark.parametrize("columns", [2, 5])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_ddp_everywhere(
    ranks: Callable[[int], Ranks], algorithm: str, world_size: int, sparse: bool, columns: int
) -> None:
    """The same in every schedule, for whole and for sparse gradients, with ranks that own no columns."""
    run = functools.partial(ranks(world_size).run, world_size=world_size, columns=columns)
    expected = run(clip, "ddp", algorithm, sparse)
    for schedule in get_args(Name):
        assert_same(run(clip, "embrace", algorithm, sparse, options={"schedule": schedule}), expected, schedule)


@pytest.mark.parametrize(
    ("cls", "world_size", "sparse", "schedule"),
    [
        (TorchsNorm, 2, False, "2d"),
        (Sum, 3, True, "fifo"),
        (Cubes, 2, True, "2d"),
        (Largest, 3, False, "2d"),
        (Largest, 2, True, "fifo"),
        (AfterBackward, 2, False, "2d"),
        (AfterBackward, 3, True, "vertical"),
    ],
)
def test_torchs_own_function(
    ranks: Callable[[int], Ranks], cls: Any, world_size: int, sparse: bool, schedule: str
) -> None:
    """`clip_grad_norm_` took the norm of this rank's columns: every rank clipped by another factor, in silence."""
    run = functools.partial(ranks(world_size).run, world_size=world_size)
    expected = run(clip, "ddp", None, sparse, cls)
    assert all(min(result["evaluated"]) > 0.001 for result in expected)
    assert_same(run(clip, "embrace", None, sparse, cls, options={"schedule": schedule}), expected)


class OnRank0(Whole):
    def on_after_backward(self) -> None:
        if self.global_rank == 0:
            clip_grad_norm_(self.parameters(), 0.02)


def test_clipping_on_one_rank_alone(ranks: Callable[[int], Ranks]) -> None:
    """Under ddp the ranks would drift apart. The others are in a collective of Lightning's: `timeout` ends it."""
    outcomes = ranks(2).try_run(clip, "embrace", None, False, OnRank0, timeout=30.0, options={"timeout": BRIEF})
    assert not any(ok for ok, _ in outcomes)
    assert "This rank takes the norm of gradients" in outcomes[0][1]
    assert "clip gradients and call `full_state_dict()` on every rank" in outcomes[0][1]


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
