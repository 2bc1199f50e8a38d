"""Callbacks that average weights have sharded copies of sharded tables, and come to what they come to under ``ddp``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from tests.support.lifecycle import (
    Whole,
    assert_same,
    loader,
    make_model,
    make_strategy,
    make_trainer,
    plain,
    results,
    this_rank,
)


class Normalised(Whole):
    """With batch statistics that differ between the ranks."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.norm = nn.BatchNorm1d(5).double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.words(ids).mean(1) + self.bags(ids)))).squeeze(1)


class Slow(Whole):
    """One rank looks up when the other has long ended its validation."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        time.sleep(0.1 * this_rank())
        self.evaluated.append(float(self.loss(batch).detach()))


class EveryEpoch(WeightAveraging):
    """Averages at the ends of epochs."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


#: name: callback, model, more of the Trainer's arguments
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mean": (lambda: WeightAveraging(), Whole, {}),
    "ema": (lambda: EMAWeightAveraging(decay=0.5, update_starting_at_step=2), Whole, {}),
    "ema, validated inside a window": (
        lambda: EMAWeightAveraging(decay=0.5),
        Whole,
        {"accumulate_grad_batches": 3, "val_check_interval": 2},
    ),
    "ema, one rank behind": (lambda: EMAWeightAveraging(decay=0.5), Slow, {"num_sanity_val_steps": 1}),
    "every epoch": (lambda: EveryEpoch(), Whole, {"num_sanity_val_steps": 1}),
    "ema, batch statistics": (lambda: EMAWeightAveraging(decay=0.5), Normalised, {}),
    "swa": (lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2), Whole, {}),
    "swa, batch statistics": (lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1), Normalised, {}),
}


def fit(strategy: str, case: str) -> Any:
    """Runs in a worker."""
    make, cls, arguments = CASES[case]
    model, callback = make_model(cls=cls), make()
    trainer = make_trainer(make_strategy(strategy), callbacks=[callback], **{"max_epochs": 3, **arguments})
    trainer.fit(model, loader(4), loader(2, 5))
    return results(model, trainer), plain(dict(callback._average_model.state_dict()))


@pytest.mark.parametrize("case", CASES)
def test_equals_ddp(ranks, case):
    """Validation sees the averages, training goes on with its own weights, and at the end the averages are there."""
    expected = ranks(2).run(fit, "ddp", case)
    assert_same(ranks(2).run(fit, "embrace", case), expected, tolerance=1e-10)


@pytest.mark.parametrize("schedule", ["fifo", "horizontal"])
def test_equals_ddp_at_three_ranks_under_other_schedules(ranks, schedule):
    """Fewer columns than twice the ranks, and other late updates."""
    expected = ranks(3).run(fit_three, "ddp", {})
    assert_same(ranks(3).run(fit_three, "embrace", {"schedule": schedule}), expected, tolerance=1e-10)


def fit_three(strategy: str, more: dict[str, Any]) -> Any:
    """Runs in a worker."""
    model, callback = make_model(), EMAWeightAveraging(decay=0.7)
    trainer = make_trainer(make_strategy(strategy, **more), 3, callbacks=[callback], max_epochs=2)
    trainer.fit(model, loader(4, world_size=3), loader(2, 5, world_size=3))
    return results(model, trainer)


SAVERS: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.5),
    "swa": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2),
}


def save_and_go_on(strategies: tuple[str, str], kind: str, folder: Path) -> Any:
    """Saves in the second of three epochs under one strategy, and goes on under another."""
    path = folder / f"{strategies[0]}-{kind}.ckpt"
    model, callback = make_model(), SAVERS[kind]()

    def save(trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint(path)

    model.on_train_batch_end = lambda *_: save(model.trainer, model)
    trainer = make_trainer(make_strategy(strategies[0]), callbacks=[callback], max_epochs=3)
    trainer.fit(model, loader(4), loader(2, 5))
    again, callback = make_model(seed=2), SAVERS[kind]()
    trainer = make_trainer(make_strategy(strategies[1]), callbacks=[callback], max_epochs=3)
    trainer.fit(again, loader(4), loader(2, 5), ckpt_path=path, weights_only=False)
    return results(again, trainer)


@pytest.mark.parametrize("kind", SAVERS)
def test_checkpoints_interchange_with_ddp(ranks, tmp_path, kind):
    """A file holds whole averages beside whole weights, and either strategy goes on from either's file."""
    expected = ranks(2).run(save_and_go_on, ("ddp", "ddp"), kind, tmp_path)
    for pair in (("embrace", "embrace"), ("ddp", "embrace"), ("embrace", "ddp")):
        assert_same(ranks(2).run(save_and_go_on, pair, kind, tmp_path), expected, str(pair), tolerance=1e-10)
    ours, theirs = (torch.load(tmp_path / f"{s}-{kind}.ckpt", weights_only=False) for s in ("embrace", "ddp"))
    for key in ("state_dict", "current_model_state", "averaging_state", "callbacks"):
        assert_same(plain(ours.get(key)), plain(theirs.get(key)), key, tolerance=1e-10)


def shares(case: str) -> list[tuple[int, ...]]:
    """Runs in a worker: what a rank holds of the averages while it trains."""
    seen: list[tuple[int, ...]] = []
    callback = CASES[case][0]()

    class Looking(Whole):
        def on_train_batch_end(self, *_: Any) -> None:
            average = callback._average_model
            seen.append(tuple(getattr(average, "module", average).words._parameters["weight"].shape))

    make_trainer(make_strategy("embrace"), callbacks=[callback]).fit(make_model(cls=Looking), loader(2))
    return seen


@pytest.mark.parametrize("case", ["mean", "swa"])
def test_a_rank_keeps_its_columns_of_the_averages(ranks, case):
    """Five columns on two ranks: three and two, not five."""
    assert ranks(2).run(shares, case) == [[(23, 3)] * 2, [(23, 2)] * 2]


def ask_the_copy(what: str) -> None:
    """Runs in a worker."""
    callback = EMAWeightAveraging(decay=0.5)

    class Asking(Whole):
        def on_train_batch_end(self, *_: Any) -> None:
            callback._average_model(torch.tensor([[1, 2]]))

    callbacks = [callback] if what == "look-up" or this_rank() == 0 else []
    make_trainer(make_strategy("embrace"), callbacks=callbacks).fit(make_model(cls=Asking), loader(2))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("look-up", "EMAWeightAveraging's copy of words, of which each rank holds some columns"),
        ("one rank", "average weights in 1, 0 copies of the model. Give every rank the same callbacks"),
    ],
)
def test_what_cannot_work_says_so(ranks, what, said):
    """A look-up in the copy would find some columns only; a copy on one rank would wait for the others."""
    for ok, text in ranks(2).try_run(ask_the_copy, what):
        assert not ok and said in text, text


class Early(Whole):
    """Knows how many rows came early."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.early = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.early += self.trainer.strategy._session.foresight.counts["early"]


class Meddling(EMAWeightAveraging):
    """Changes weights in a hook that the base only reads them in."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *arguments)
        for parameter in pl_module.parameters():
            parameter.data.mul_(0.9)


def early(strategy: str, averages: Any) -> Any:
    """Runs in a worker."""
    model = make_model(cls=Early)
    more = {"lookahead": lambda batch: {"words": batch["ids"], "bags": batch["ids"]}}
    if strategy == "ddp":
        model.on_train_batch_end, more = lambda *_: None, {}  # type: ignore[method-assign]
    make_trainer(make_strategy(strategy, **more), callbacks=[averages()]).fit(model, loader(8))
    return plain(dict(model.state_dict())), model.early


@pytest.mark.parametrize("averages", [EMAWeightAveraging, Meddling])
def test_averaging_keeps_rows_that_came_early_unless_it_changes_them(ranks, averages):
    """It reads every weight after every step, and reading alone counts as changing elsewhere."""
    expected = ranks(2).run(early, "ddp", averages)
    got = ranks(2).run(early, "embrace", averages)
    assert_same([state for state, _ in got], [state for state, _ in expected], tolerance=1e-10)
    assert all((count > 0) == (averages is EMAWeightAveraging) for _, count in got)
