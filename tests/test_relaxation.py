"""What keeps updates from being late: whatever could see a gradient or a weight unnoticed, and nothing else."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, callbacks
from torch import nn

from lightning_embrace.namespaces import LIGHTNING
from lightning_embrace.relaxation import why_disturbed, why_not_relaxed


class Plain(LightningModule):
    """Hooks that get no optimizer read through the model, which is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2)
        self.lstm = nn.LSTM(2, 2)
        self.notes = [1, "two", torch.zeros(2)]

    def on_train_batch_end(self, *_: Any) -> None:
        self.lstm.weight_ih_l0.norm()

    def on_after_backward(self) -> None:
        self.table.weight.grad.norm()


def _with_hook(name: str) -> type[Plain]:
    return type("Hooked", (Plain,), {name: lambda self, *args, **kwargs: None})


class Reader(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.table.weight.norm()


class Stepping(Callback):
    def on_before_optimizer_step(self, *_: Any) -> None: ...


class Zeroing(Callback):
    def on_before_zero_grad(self, *_: Any) -> None: ...


def reason(module: Any, *extra: Any, scaler: Any = None, clip: float | None = None) -> str | None:
    trainer = SimpleNamespace(callbacks=list(extra), gradient_clip_val=clip)
    return why_not_relaxed(trainer, module, SimpleNamespace(scaler=scaler), LIGHTNING)


BUILT_IN = [
    callbacks.ModelCheckpoint(),
    callbacks.LearningRateMonitor(),
    callbacks.TQDMProgressBar(),
    callbacks.EarlyStopping("loss"),
    callbacks.GradientAccumulationScheduler({0: 1}),
    callbacks.Timer(),
]


def test_nothing_stands_against_it() -> None:
    """A plain model, its own reading hooks, Lightning's callbacks and a user's that reads through the model."""
    assert reason(Plain(), *BUILT_IN, Reader()) is None
    trainer = SimpleNamespace(callbacks=[*BUILT_IN, Reader()])
    assert why_disturbed(trainer, Plain(), LIGHTNING) is None


def test_manual_optimization() -> None:
    module = Plain()
    module.automatic_optimization = False
    assert reason(module) == "optimization is manual"


def test_the_trainers_own_reasons() -> None:
    assert reason(Plain(), scaler=object()) == "the gradient scaler decides whether a step counts"
    assert reason(Plain(), clip=0.5) == "gradients are clipped"
    assert reason(Plain(), clip=0.0) is None


@pytest.mark.parametrize(
    "hook",
    [
        "on_before_optimizer_step",
        "on_before_zero_grad",
        "optimizer_step",
        "optimizer_zero_grad",
        "configure_gradient_clipping",
        "clip_gradients",
        "backward",
    ],
)
def test_a_hook_that_is_given_the_optimizer(hook: str) -> None:
    """Through it weights and gradients are read past the model."""
    module = _with_hook(hook)()
    assert reason(module) == f"Hooked overrides `{hook}`"
    trainer = SimpleNamespace(callbacks=[])
    assert why_disturbed(trainer, module, LIGHTNING) == f"Hooked overrides `{hook}`"


@pytest.mark.parametrize(
    ("callback", "hook"), [(Stepping(), "on_before_optimizer_step"), (Zeroing(), "on_before_zero_grad")]
)
def test_a_users_callback_that_is_given_the_optimizer(callback: Callback, hook: str) -> None:
    expected = f"{type(callback).__name__} overrides `{hook}`"
    assert reason(Plain(), *BUILT_IN, callback) == expected
    assert why_disturbed(SimpleNamespace(callbacks=[callback]), Plain(), LIGHTNING) == expected


def test_parameters_in_a_callbacks_hands() -> None:
    """It may read them whenever it likes, without the model."""
    module, reader = Plain(), Reader()
    reader.mine = [nn.Parameter(torch.zeros(1))]  # type: ignore[attr-defined]
    assert reason(module, reader) is None, "these are no parameters of the model"
    for kept in (module.table.weight, {"a": (module.table.weight,)}, weakref.ref(module.table.weight)):
        reader.kept = kept  # type: ignore[attr-defined]
        assert reason(module, reader) == "`Reader.kept` holds parameters past their modules"


def test_parameters_in_a_modules_lists() -> None:
    """A list that the model reads is not a way by the gate, except in torch's recurrent layers, which are seen."""
    module = Plain()
    module.penalised = [module.table.weight]
    assert reason(module) == "`Plain.penalised` holds parameters past their modules"


class Decorated(nn.Linear):
    """Compiled where it is written."""

    forward = torch.compile(nn.Linear.forward, backend="eager")


def test_a_compiled_part_reads_unseen() -> None:
    """However it was compiled."""
    module = Plain()
    module.lstm.compile(backend="eager")
    assert reason(module) == "lstm is compiled, and reads its parameters unseen"
    module = Plain()
    module.scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    assert reason(module) == "scripted is compiled, and reads its parameters unseen"
    module = Plain()
    module.wrapped = torch.compile(nn.Linear(2, 2), backend="eager")
    assert reason(module) == "wrapped is compiled, and reads its parameters unseen"
    module = Plain()
    module.decorated = Decorated(2, 2)
    assert reason(module) == "decorated is compiled, and reads its parameters unseen"
    module = Plain()
    module.loss = torch.compile(module.on_after_backward, backend="eager")
    assert reason(module) == "the model is compiled, and reads its parameters unseen"
