"""``python -m lightning_embrace plan`` for a model that no machine could build."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch

from lightning_embrace import cli
from lightning_embrace.hydra.config import HydraConfig
from lightning_embrace.hydra.dryrun import planned_of
from lightning_embrace.hydra.plan import DoesNotFitError
from lightning_embrace.namespaces import LIGHTNING
from tests.hydra import zoo
from tests.hydra.runs import fit, hydra


def config(device: str) -> HydraConfig:
    return HydraConfig.checked(device, None, None, "auto", True)


def test_it_is_what_training_begins_with() -> None:
    """The same bytes as for a model that is built."""
    make = partial(zoo.Stack, lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    with torch.device("meta"):
        model = make()
    planned = planned_of(model, config("120KiB"), torch.device("cpu"), LIGHTNING)
    strategy = hydra(device_memory="120KiB")
    fit(make, strategy, zoo.batches(1))  # no second step: the plan that it began with
    assert planned.units == strategy.planned.units
    assert planned.plan.places == strategy.planned.plan.places
    assert not any("_compiled_call_impl" in vars(m) for m in model.modules())


def test_refused() -> None:
    with torch.device("meta"):
        model = zoo.Stack()
    with pytest.raises(DoesNotFitError, match=r"'blocks\.\d'"):
        planned_of(model, config("20KiB"), torch.device("cpu"), LIGHTNING)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    arguments = ["--model", "tests.hydra.zoo.Grouped", "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    strategy = [
        "--trainer.strategy", "lightning_embrace.HydraStrategy", "--trainer.strategy.device_memory", "120KiB",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["x", "plan", *arguments, *strategy, "--trainer.logger", "false"])
    cli.main()
    printed = capsys.readouterr().out
    assert "blocks.0" in printed and "host" in printed and "120 KiB" in printed and "a step reads" in printed
