"""Whatever a model does with its blocks, Hydra's numbers are plain training's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from tests.hydra import zoo
from tests.hydra.runs import Run, assert_same, fit, hydra


class Case(NamedTuple):
    """A model and how it is trained.

    Attributes:
        make: Builds it.
        device: Its budget: not all of its blocks fit.
        data: What it is trained on.
        arguments: The Trainer's, made anew for each run.
        tolerance: 0: bit by bit.
    """

    make: Callable[[], Any]
    device: str = "80KiB"
    data: Callable[[], list[Any]] = zoo.batches
    arguments: Callable[[], dict[str, Any]] = dict
    tolerance: float = 0.0


def optimizer(kind: Any, **settings: Any) -> Callable[[Any], Any]:
    return lambda parameters: kind(parameters, **settings)


def stack(kind: Any, **settings: Any) -> Callable[[], Any]:
    return partial(zoo.Stack, optimizer(kind, **settings))


def half() -> dict[str, Any]:
    """The scale grows every other step until it overflows: steps are skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2, growth_factor=8.0)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


CASES = {
    "stack": Case(zoo.Stack),
    "in place": Case(zoo.InPlace, tolerance=1e-6),
    "skips": Case(zoo.Skips),
    "twice": Case(zoo.Twice),
    "frozen": Case(zoo.Frozen),
    "unused": Case(zoo.Unused),
    "tied": Case(zoo.Tied, "100KiB"),
    "random": Case(zoo.Random),
    "batch norm": Case(partial(zoo.Stack, make=zoo.batch_norm)),
    "spectral norm": Case(partial(zoo.Stack, make=zoo.spectral_norm)),
    "structured": Case(zoo.Structured),
    "transformer": Case(zoo.Seq2Seq, "100KiB", zoo.sentences),
    "large head": Case(zoo.Language, "200KiB", zoo.sentences),
    "large head, tied": Case(partial(zoo.Language, tied=True), "170KiB", zoo.sentences),
    "momentum": Case(stack(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)),
    "adamw": Case(stack(torch.optim.AdamW, lr=0.01), "120KiB"),
    "amsgrad": Case(stack(torch.optim.Adam, lr=0.01, amsgrad=True), "150KiB"),
    "adagrad": Case(stack(torch.optim.Adagrad, lr=0.05)),
    "rmsprop": Case(stack(torch.optim.RMSprop, lr=0.01, momentum=0.5), "120KiB"),
    "groups and scheduler": Case(zoo.Grouped, "120KiB"),
    "clip by norm": Case(zoo.Stack, arguments=lambda: {"gradient_clip_val": 0.5}),
    "clip by value": Case(zoo.Stack, arguments=lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulation": Case(stack(torch.optim.AdamW, lr=0.01), "120KiB", arguments=lambda: {"accumulate_grad_batches": 3}),
    "manual": Case(zoo.Manual),
    "bf16": Case(zoo.Random, arguments=lambda: {"precision": "bf16-mixed"}),
    "half": Case(zoo.Stack, arguments=half),
    "half, clipped": Case(zoo.Stack, arguments=lambda: {**half(), "gradient_clip_val": 0.5}),
    "double": Case(zoo.Stack, "150KiB", arguments=lambda: {"precision": "64-true"}),
}

_plain: dict[str, Run] = {}


def plain(name: str) -> Run:
    """One plain run for all tests of a case."""
    if name not in _plain:
        case = CASES[name]
        _plain[name] = fit(case.make, "auto", case.data(), **case.arguments())
    return _plain[name]


def check(name: str, folder: Path | None, prefetch: bool) -> None:
    case = CASES[name]
    tier = {"disk": folder, "host_memory": "4KiB"} if folder else {}
    strategy = hydra(device_memory=case.device, prefetch=prefetch, **tier)
    ours = fit(case.make, strategy, case.data(), **case.arguments())
    assert_same(ours, plain(name), case.tolerance)
    plan = strategy.planned.plan
    assert plan.shards, "everything stayed on the device: nothing was shown"
    assert set(plan.places) <= {"device", "disk" if folder else "host"}
    if name.startswith("half"):
        scale = ours.trainer.strategy.precision_plugin.scaler.get_scale()
        assert scale < 2.0**14 * 8.0**9, "no step was skipped: nothing was shown"


@pytest.mark.parametrize("name", CASES)
def test_on_the_host(name: str) -> None:
    """Twenty steps, bit by bit."""
    check(name, None, prefetch=True)


@pytest.mark.parametrize("name", ["stack", "adamw", "accumulation"])
def test_on_the_disk(name: str, tmp_path: Path) -> None:
    """What is read back is what was written."""
    check(name, tmp_path, prefetch=True)


@pytest.mark.matrix
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("name", CASES)
def test_everywhere(name: str, tier: str, prefetch: bool, tmp_path: Path) -> None:
    """The whole list on every tier, with and without prefetch."""
    check(name, tmp_path if tier == "disk" else None, prefetch)
