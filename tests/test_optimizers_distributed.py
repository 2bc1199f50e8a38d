"""Optimizers, schedulers, accumulation and manual optimization, as users write them, equal ddp's to 1e-10 in fp64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_embrace import EmbRaceStrategy, optim
from lightning_embrace.schedule.order import Name
from tests.exactness.models import COLUMNS, AccumulatedByHand, Adversaries, TwoLosses, Words
from tests.support.ddp import Comparison, compare, even
from tests.support.lifecycle import this_rank
from tests.support.models import OneTable, TwoTables, batches
from tests.support.ranks import Ranks
from tests.support.training import train

UNUSED = "ddp_find_unused_parameters_true"
PAIRS: list[tuple[int, Name]] = [(2, "fifo"), (3, "2d"), (3, "fifo"), (2, "2d")]


# ---- automatic optimization ---------------------------------------------------------------------------------------


class Own(TwoTables):
    """An optimizer of one's own; records the learning rate beside the loss.

    Args:
        configure: Gets the model, returns what ``configure_optimizers`` is to return.
        columns: D.
        sparse: For the tables.
    """

    def __init__(self, configure: Callable[[Any], Any], columns: int = COLUMNS, sparse: bool = False) -> None:
        super().__init__(columns, sparse, "own")
        self.configure = configure

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(self.trainer.optimizers[0].param_groups[-1]["lr"])
        return loss

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def torchs(name: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Any of torch's optimizers for all parameters."""
    return getattr(torch.optim, name)(model.parameters(), **options)


def ours(name: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """One of this package's optimizers."""
    return getattr(optim, name)(model.parameters(), **options)


def in_groups(model: Any) -> torch.optim.Optimizer:
    """Tables and dense parameters share groups, each with other settings; one stands still."""
    groups = [
        {"params": [model.words.weight, model.head.bias], "lr": 0.05, "betas": (0.8, 0.9)},
        {"params": [model.tags.weight], "lr": 0.0, "weight_decay": 0.5},
        {"params": [model.head.weight], "weight_decay": 0.1, "amsgrad": True},
    ]
    return torch.optim.AdamW(groups, lr=0.02)


def scheduled(make: Callable[[Any], Any], model: nn.Module, **settings: Any) -> dict[str, Any]:
    """Momentum with a scheduler."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **settings}}


def halving(optimizer: Any) -> Any:
    """Steps down every time it is asked to."""
    return lr_scheduler.StepLR(optimizer, 1, 0.5)


def plateau(optimizer: Any) -> Any:
    """Wants the loss to grow, which it does not always."""
    return lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)


def cycle(optimizer: Any) -> Any:
    """Changes momentum, too."""
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=20, cycle_momentum=True)


def two_schedulers(model: nn.Module) -> Any:
    """One for steps and one for epochs, on the same optimizer."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    step = {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step", "frequency": 2}
    return [optimizer], [step, {"scheduler": halving(optimizer), "interval": "epoch"}]


class Kept(Own):
    """Parameters, or the whole optimizer, are collected in ``__init__``, before any strategy has seen the model."""

    def __init__(self, ready: bool) -> None:
        super().__init__(self.own)
        self.mine = list(self.parameters())
        self.groups = {"tables": [self.words.weight, self.tags.weight], "head": [*self.head.parameters()]}
        self.ready = torch.optim.Adam(self.mine, lr=0.02) if ready else None

    def own(self, _: Any) -> torch.optim.Optimizer:
        if self.ready is not None:
            return self.ready
        return torch.optim.RMSprop([{"params": self.groups["tables"], "lr": 0.02}, {"params": self.groups["head"]}])


class Zeroed(Own):
    """Leaves zeros where a gradient was: of a table that no step has used since, too."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Skipping(Own):
    """Steps after every second batch alone, and validates after each."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.losses += [float(self.loss(batch)), 0.0]

    def val_dataloader(self) -> Any:
        held_out: Any = [step[0] for step in batches(2, 1, seed=9)]
        return DataLoader(held_out, batch_size=None)


class Extragradient(torch.optim.SGD):
    """Moves along the gradient that it finds one step further on: evaluates the model twice."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        mine = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in mine]
        super().step()
        loss = closure()
        with torch.no_grad():
            for parameter, old in zip(mine, before):
                parameter.copy_(old)
        super().step()
        return loss


class Inner(torch.optim.SGD):
    """Calls the closure twice for one step of its own."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


def with_closure(kind: type[torch.optim.Optimizer], model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """One of those above and below."""
    return kind(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]


class Forgetful(torch.optim.LBFGS):
    """Its history is lists and each rank's own loss, which no comparison of state dicts knows."""

    def state_dict(self) -> Any:
        return {**super().state_dict(), "state": {}}


#: as many evaluations on every rank, whatever its own loss is
LBFGS = {"max_iter": 3, "tolerance_change": 0.0, "tolerance_grad": 0.0}


def own(configure: Callable[..., Any], *first: Any, model: dict[str, Any] | None = None, **options: Any) -> Any:
    """Builds the model; can be pickled."""
    return functools.partial(Own, functools.partial(configure, *first, **options), **(model or {}))


EPOCHS = {"max_epochs": 3}
ACCUMULATING = {"max_epochs": 3, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]}
_seven = functools.partial(even, steps=7)
_two = functools.partial(even, steps=2)
ELEMENTWISE = ["Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]

AUTOMATIC = {
    "parameter groups": Comparison(own(in_groups), even),
    **{f"{name}": Comparison(own(torchs, name, lr=0.02), even) for name in ELEMENTWISE},
    "RMSprop with everything": Comparison(
        own(torchs, "RMSprop", lr=0.02, centered=True, momentum=0.5, weight_decay=0.1), even
    ),
    "fused Adam": Comparison(own(torchs, "Adam", lr=0.02, fused=True), even),
    "fused AdamW, fewer columns than ranks": Comparison(
        own(torchs, "AdamW", lr=0.02, fused=True, model={"columns": 2}), even
    ),
    "fused SGD": Comparison(own(torchs, "SGD", lr=0.1, momentum=0.9, fused=True), even),
    "fused Adagrad": Comparison(own(torchs, "Adagrad", lr=0.05, fused=True), even),
    "foreach Adam": Comparison(own(torchs, "Adam", lr=0.02, foreach=True), even),
    "foreach Adagrad, fewer columns than ranks": Comparison(
        own(torchs, "Adagrad", lr=0.05, foreach=True, model={"columns": 2}), even
    ),
    "our foreach AdamW": Comparison(own(ours, "AdamW", lr=0.02, foreach=True, model={"sparse": False}), even),
    "a rate by epoch": Comparison(own(scheduled, halving, interval="epoch"), _two, arguments=EPOCHS),
    "a rate by every second step": Comparison(own(scheduled, halving, interval="step", frequency=2), even),
    "a rate and a momentum by step": Comparison(own(scheduled, cycle, interval="step"), even),
    "rates by step and by epoch": Comparison(own(two_schedulers), _two, arguments=EPOCHS),
    "a plateau by epoch": Comparison(
        own(scheduled, plateau, interval="epoch", monitor="loss"), _two, arguments={"max_epochs": 5}
    ),
    "a plateau by step": Comparison(own(scheduled, plateau, interval="step", monitor="loss"), even),
    "windows that change": Comparison(own(torchs, "AdamW", lr=0.02), _seven, arguments=ACCUMULATING),
    "windows that change, sparse": Comparison(
        own(torchs, "Adagrad", lr=0.05, model={"sparse": True}), _seven, arguments=ACCUMULATING
    ),
    "a window longer than the epoch": Comparison(
        own(torchs, "Adam", lr=0.02), _two, arguments={"accumulate_grad_batches": 4, "max_epochs": 3}
    ),
    "zeros for gradients": Comparison(functools.partial(Zeroed, functools.partial(torchs, "AdamW", lr=0.02)), even),
    "zeros for gradients, sparse": Comparison(
        functools.partial(Zeroed, functools.partial(torchs, "Adagrad", lr=0.05), sparse=True), even
    ),
    "steps left out before validation": Comparison(
        functools.partial(Skipping, functools.partial(torchs, "Adam", lr=0.02)),
        even,
        arguments={"val_check_interval": 1},
    ),
    "parameters kept in __init__": Comparison(functools.partial(Kept, False), even),
    "an optimizer made in __init__": Comparison(functools.partial(Kept, True), even),
    "a closure that runs twice": Comparison(own(with_closure, Inner, momentum=0.9), even),
    "a closure that runs twice, with a step between": Comparison(own(with_closure, Extragradient), even),
    "LBFGS, tables whole": Comparison(own(with_closure, Forgetful, **LBFGS), even, tables=()),
}


class Counting(Callback):
    """Whether gradients were exchanged in a batch: rows, and dense ones."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        calls = trainer.strategy.traffic.calls
        self.seen.append((calls.get("grads", 0) > 0, calls.get("dense", 0) > 0))
        trainer.strategy.traffic.reset()


def count() -> list[tuple[bool, bool]]:
    """Runs in a worker: windows of one and of three batches."""
    counting = Counting()
    callbacks = [counting, GradientAccumulationScheduler({0: 1, 1: 3})]
    data = even(this_rank(), 2, steps=4)
    strategy = EmbRaceStrategy(tables=["*"], schedule="fifo")
    train(own(torchs, "Adam"), data, strategy, 2, callbacks=callbacks, max_epochs=2)
    return counting.seen


def test_gradients_are_exchanged_once_a_window(ranks: Callable[[int], Ranks]) -> None:
    """Also those of the last window, which has one batch."""
    steps = [True, True, True, True, False, False, True, True]
    assert ranks(2).run(count) == [[(step, step) for step in steps]] * 2


# ---- manual optimization ------------------------------------------------------------------------------------------


class Documented(Adversaries):
    """As Lightning's documentation has it: closures, ``toggle_model``, gradients synchronised every second batch."""

    def __init__(self) -> None:
        super().__init__()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        last = batch_idx % 2 == 1

        def closure(optimizer: Any, generating: bool) -> None:
            fake = self.generate(batch)
            score = self.score(fake if generating else fake.detach(), batch)
            loss = -score.mean() if generating else (score - batch["target"].unsqueeze(1)).pow(2).mean()
            self.losses.append(float(loss.detach()))
            self.manual_backward(loss / 2)

        for number, optimizer in enumerate(self.optimizers()):
            with optimizer.toggle_model(sync_grad=last):
                if last:
                    optimizer.step(closure=functools.partial(closure, optimizer, number == 0))
                    optimizer.zero_grad()
                else:
                    closure(optimizer, number == 0)
        if last:
            for schedule in self.lr_schedulers():
                schedule.step()

    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        return optimizers, [halving(o) for o in optimizers]


class Clipped(Adversaries):
    """Clips between backward and the step, with Lightning's function or with torch's."""

    def __init__(self, norm_type: float | None) -> None:
        super().__init__()
        self.norm_type = norm_type

    def turn(self, optimizer: Any, loss: Tensor | None, batch: dict[str, Tensor]) -> None:
        generating = optimizer is self.optimizers()[0]
        self.toggle_optimizer(optimizer)
        fake = self.generate(batch)
        score = self.score(fake if generating else fake.detach(), batch)
        optimizer.zero_grad()
        self.manual_backward(-score.mean() if generating else (score - batch["target"].unsqueeze(1)).pow(2).mean())
        if self.norm_type is None:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        else:
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            self.losses.append(float(clip_grad_norm_(mine, 0.05, self.norm_type)))
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        self.losses.append(float(score.detach().mean()))


class Rescaled(Words):
    """Looks at its gradients, and changes them, before it steps on them."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.losses += [float(loss.detach()), float(self.head[0].weight.grad.norm())]
        for number, parameter in enumerate(self.parameters()):
            assert parameter.grad is not None
            parameter.grad.mul_(1.0 / (1 + number)).add_(parameter.grad.sign(), alpha=0.01)
        optimizer.step()


class TwoKinds(OneTable):
    """SparseAdam for the table, Adam for the rest; the look-up is repeated between their steps."""

    def __init__(self) -> None:
        super().__init__(COLUMNS, True, "sparseadam")
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            for other in self.optimizers():
                other.zero_grad()
            loss = self.loss(batch)
            self.losses.append(float(loss.detach()))
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SparseAdam(self.table.parameters(), lr=0.01),
            torch.optim.Adam(self.head.parameters(), lr=0.01),
        ]


MANUAL = {
    "as documented": Comparison(Documented, even, ddp=UNUSED),
    "clipping by hand": Comparison(functools.partial(Clipped, None), even, ddp=UNUSED),
    "torch's clipping by hand": Comparison(functools.partial(Clipped, 2.0), even, ddp=UNUSED),
    "torch's clipping of the largest": Comparison(functools.partial(Clipped, torch.inf), even, ddp=UNUSED),
    "gradients changed before the step": Comparison(Rescaled, even),
    "SparseAdam and Adam": Comparison(TwoKinds, even),
    "two optimizers, toggled": Comparison(Adversaries, even, ddp=UNUSED),
    "two backward passes": Comparison(functools.partial(TwoLosses, "adam"), even),
    "two backward passes, sparse": Comparison(functools.partial(TwoLosses, "adagrad", True), even),
    "accumulation by hand, sparse": Comparison(functools.partial(AccumulatedByHand, "adagrad", True), even),
}
CASES = {**AUTOMATIC, **MANUAL}
#: each case in one of the ways
SAMPLE = [(name, *PAIRS[number % len(PAIRS)]) for number, name in enumerate(CASES)]


def check(ranks: Callable[[int], Ranks], name: str, world_size: int, schedule: Name) -> None:
    """Runs a case; schedulers must have changed something."""
    pairs = compare(ranks, CASES[name]._replace(world_size=world_size, schedule=schedule))
    if name.startswith(("a rate", "rates", "a plateau")):
        assert len(set(pairs[0].theirs.losses[1::2])) > 1


@pytest.mark.parametrize(("name", "world_size", "schedule"), SAMPLE)
def test_equals_ddp(ranks: Callable[[int], Ranks], name: str, world_size: int, schedule: Name) -> None:
    """Parameters, optimizer state and losses; each case on two or on three ranks, in one of two schedules."""
    check(ranks, name, world_size, schedule)


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", get_args(Name))
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_ddp_everywhere(ranks: Callable[[int], Ranks], name: str, world_size: int, schedule: Name) -> None:
    """All cases, on two and on three ranks, in every schedule."""
    check(ranks, name, world_size, schedule)


def test_the_sample_has_every_way() -> None:
    """On two and three ranks, in both schedules, automatic and manual."""
    for kind in (AUTOMATIC, MANUAL):
        assert {(n, s) for name, n, s in SAMPLE if name in kind} == set(itertools.product((2, 3), ("2d", "fifo")))
