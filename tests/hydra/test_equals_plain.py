"""Whatever a model does with its blocks, and whatever trains it, Hydra's numbers are plain training's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from tests.hydra import zoo
from tests.hydra.cases import PLACES, Case, assert_equals_plain, sample
from tests.hydra.runs import STEPS, Run


def stack(kind: Any, **settings: Any) -> Callable[[], Any]:
    return partial(zoo.Stack, lambda parameters: kind(parameters, **settings))


def half() -> dict[str, Any]:
    """The scale grows every other step until it overflows: steps are skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2, growth_factor=8.0)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def some_were_skipped(run: Run) -> None:
    made = {int(state["step"]) for state in run.optimizer[0]["state"].values()}
    assert len(made) == 1 and 0 < made.pop() < STEPS, "no step was skipped: nothing was shown"


def some_are_kept(run: Run) -> None:
    assert any(run.trainer.strategy.planned.plan.kept), "all activations were computed again: nothing was shown"


def slow(parameters: Any) -> Any:
    """For models whose loss would grow without bound."""
    return torch.optim.SGD(parameters, lr=0.002)


ADAMW = stack(torch.optim.AdamW, lr=0.01)
MODELS = {
    "stack": Case(zoo.Stack),
    "in place": Case(zoo.InPlace),
    # one input of all blocks: a sum of six gradients
    "shared input": Case(zoo.Shared, "90KiB", tolerance=1e-6),
    "skips": Case(zoo.Skips),
    "twice": Case(zoo.Twice),
    # two gradients of each parameter in each of three batches
    "twice, accumulated": Case(zoo.Twice, arguments=lambda: {"accumulate_grad_batches": 3}, tolerance=1e-6),
    "frozen": Case(zoo.Frozen),
    "unused": Case(zoo.Unused),
    "tied": Case(zoo.Tied, "95KiB"),
    "random": Case(zoo.Random),
    "batch norm": Case(partial(zoo.Stack, slow, make=zoo.batch_norm)),
    "spectral norm": Case(partial(zoo.Stack, make=zoo.spectral_norm), "110KiB"),
    "weight norm": Case(partial(zoo.Stack, make=zoo.weight_norm)),
    "structured": Case(partial(zoo.Structured, slow)),
    "transformer": Case(zoo.Seq2Seq, "150KiB", zoo.sentences),
    "recurrent": Case(zoo.Recurrent, "180KiB", zoo.sentences),
    "large head": Case(zoo.Language, "200KiB", zoo.sentences),
    "large head, tied": Case(partial(zoo.Language, tied=True), "170KiB", zoo.sentences),
    "mixed dtypes": Case(partial(zoo.MixedDtypes, slow), "70KiB"),
    "activations kept": Case(zoo.Stack, "100KiB", check=some_are_kept),
}
TRAINING = {
    "groups and scheduler": Case(zoo.Grouped, "120KiB"),
    "one cycle": Case(zoo.OneCycle, "120KiB"),
    "plateau": Case(zoo.Plateau),
    "clip by norm": Case(zoo.Stack, arguments=lambda: {"gradient_clip_val": 0.5}),
    "clip by value": Case(zoo.Stack, arguments=lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulation": Case(ADAMW, "136KiB", arguments=lambda: {"accumulate_grad_batches": 3}),
    "manual": Case(zoo.Manual),
    "bf16": Case(zoo.Random, arguments=lambda: {"precision": "bf16-mixed"}),
    "bf16, true": Case(zoo.Stack, "60KiB", arguments=lambda: {"precision": "bf16-true"}),
    "half": Case(ADAMW, "136KiB", arguments=half, check=some_were_skipped),
    "half, clipped": Case(
        ADAMW, "136KiB", arguments=lambda: {**half(), "gradient_clip_val": 0.5}, check=some_were_skipped
    ),
    "half, accumulated": Case(
        ADAMW, "136KiB", arguments=lambda: {**half(), "accumulate_grad_batches": 2}, check=some_were_skipped
    ),
    "half, fused": Case(
        stack(torch.optim.AdamW, lr=0.01, fused=True), "120KiB", arguments=half, check=some_were_skipped
    ),
    "double": Case(zoo.Stack, "150KiB", arguments=lambda: {"precision": "64-true"}),
}
OPTIMIZERS = {
    "momentum": Case(stack(torch.optim.SGD, lr=0.005, momentum=0.9, dampening=0.1, weight_decay=0.1), "100KiB"),
    "nesterov": Case(stack(torch.optim.SGD, lr=0.005, momentum=0.9, nesterov=True), "100KiB"),
    "adam": Case(stack(torch.optim.Adam, lr=0.001, weight_decay=0.1, maximize=True), "120KiB"),
    "amsgrad": Case(stack(torch.optim.Adam, lr=0.01, amsgrad=True), "150KiB"),
    "adamw": Case(ADAMW, "120KiB"),
    "adamw, foreach": Case(stack(torch.optim.AdamW, lr=0.01, foreach=True), "120KiB"),
    "adamw, fused": Case(stack(torch.optim.AdamW, lr=0.01, fused=True), "120KiB"),
    "adagrad": Case(stack(torch.optim.Adagrad, lr=0.05, lr_decay=0.1), "100KiB"),
    "rmsprop": Case(stack(torch.optim.RMSprop, lr=0.01), "120KiB"),
    "rmsprop, centered": Case(stack(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True), "150KiB"),
    "adadelta": Case(stack(torch.optim.Adadelta, lr=1.0), "120KiB"),
    "nadam": Case(stack(torch.optim.NAdam, lr=0.01, decoupled_weight_decay=True), "120KiB"),
    "radam": Case(stack(torch.optim.RAdam, lr=0.01), "120KiB"),
    "adamax": Case(stack(torch.optim.Adamax, lr=0.01), "120KiB"),
    "asgd": Case(stack(torch.optim.ASGD, lr=0.05, t0=5.0), "120KiB"),
    "rprop": Case(stack(torch.optim.Rprop, lr=0.01), "120KiB"),
    "adafactor": Case(stack(torch.optim.Adafactor, lr=0.01)),
}
if hasattr(torch.optim, "Muon"):  # since 2.9; whole matrices, one by one
    OPTIMIZERS["muon"] = Case(
        partial(zoo.Stack, lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01)),
        "100KiB",
    )
CASES = {**MODELS, **TRAINING, **OPTIMIZERS}


def check(name: str, tier: str, prefetch: bool, keep: bool, folder: Path) -> None:
    assert_equals_plain(CASES[name], name, folder if tier == "disk" else None, prefetch, keep)


@pytest.mark.parametrize(("name", "tier", "prefetch", "keep"), sample(CASES))
def test_equals_plain(name: str, tier: str, prefetch: bool, keep: bool, tmp_path: Path) -> None:
    """Twenty steps, bit by bit."""
    check(name, tier, prefetch, keep, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(("tier", "prefetch", "keep"), PLACES)
@pytest.mark.parametrize("name", CASES)
def test_everywhere(name: str, tier: str, prefetch: bool, keep: bool, tmp_path: Path) -> None:
    """The whole list on every tier, with and without prefetch, and with and without what there is room to keep."""
    check(name, tier, prefetch, keep, tmp_path)
