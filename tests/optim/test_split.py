"""Which gradients may arrive in parts, and which steps may wait: literal tables."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_embrace.optim import SGD, Adagrad, Adam, AdamW
from lightning_embrace.optim.kinds import ELEMENTWISE
from lightning_embrace.optim.split import may_defer, splits, touches_all_rows


class Subclass(torch.optim.SGD):
    """Unknown: its step may do anything."""


class OurSubclass(Adam):
    """Unknown as well."""


# optimizer, its options, sparse table, the reason against parts (None: may), whether rows without gradient may move
TABLE: list[tuple[Any, dict[str, Any], bool, str | None, bool]] = [
    (torch.optim.SGD, {}, False, None, False),
    (torch.optim.SGD, {}, True, None, False),
    (torch.optim.SGD, {"momentum": 0.9}, False, "SGD with momentum=0.9 moves every row", True),
    (torch.optim.SGD, {"momentum": 0.9}, True, "SGD with momentum=0.9 moves every row", True),
    (torch.optim.SGD, {"weight_decay": 0.1}, False, "SGD with weight_decay=0.1 moves every row", True),
    (torch.optim.SGD, {"fused": True}, False, "fused=True takes no sparse gradient", False),
    (torch.optim.SGD, {"fused": True, "momentum": 0.9}, False, "fused=True takes no sparse gradient", True),
    (torch.optim.Adagrad, {"lr_decay": 0.1}, False, None, False),
    (torch.optim.Adagrad, {"lr_decay": 0.1}, True, None, False),
    (torch.optim.Adagrad, {"weight_decay": 0.1}, False, "Adagrad with weight_decay=0.1 moves every row", True),
    (torch.optim.Adagrad, {"eps": 0}, False, "Adagrad with eps=0 divides rows without gradient by zero", True),
    (torch.optim.Adagrad, {"eps": 0}, True, None, False),
    (torch.optim.Adagrad, {"differentiable": True}, False, "differentiable=True takes no sparse gradient", False),
    (torch.optim.SparseAdam, {}, True, None, False),
    (torch.optim.Adam, {}, False, "Adam moves every row", True),
    (torch.optim.AdamW, {}, False, "AdamW moves every row", True),
    (torch.optim.RMSprop, {}, False, "RMSprop moves every row", True),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1}, True, None, False),
    (SGD, {"momentum": 0.9}, False, "lightning_embrace.optim.SGD with momentum=0.9 moves every row", True),
    (SGD, {}, False, None, False),
    (Adam, {"weight_decay": 0.1}, True, None, False),
    (Adam, {}, False, "lightning_embrace.optim.Adam moves every row", True),
    (AdamW, {}, True, None, False),
    (Adagrad, {"weight_decay": 0.1}, True, None, False),
    (Adagrad, {}, False, None, False),
    (Subclass, {}, False, "Subclass may move every row", True),
    (Subclass, {}, True, "Subclass may move every row", True),
    (OurSubclass, {}, True, "OurSubclass may move every row", True),
    (torch.optim.Adafactor, {}, False, "Adafactor may move every row", True),
]


@pytest.mark.parametrize(("kind", "options", "sparse", "reason", "touches"), TABLE)
def test_decisions(kind: Any, options: dict[str, Any], sparse: bool, reason: str | None, touches: bool) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))], lr=0.1, **options)
    assert splits(optimizer, optimizer.param_groups[0], sparse) == reason
    assert touches_all_rows(optimizer, optimizer.param_groups[0], sparse) is touches


def test_adagrad_s_eps_must_not_vanish_in_the_table_s_precision() -> None:
    """1e-10 is zero in half precision: rows without gradient become NaN, and late ones would with them."""
    half = torch.optim.Adagrad([nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))])
    assert (
        splits(half, half.param_groups[0], sparse=False)
        == "Adagrad with eps=1e-10 divides rows without gradient by zero"
    )


def test_groups_decide_one_by_one() -> None:
    a, b = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b], "momentum": 0.9}], lr=0.1)
    assert [splits(optimizer, group, sparse=False) is None for group in optimizer.param_groups] == [True, False]


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda k: f"{k.__module__}.{k.__name__}"), ids=str)
def test_known_optimizers_may_defer(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))])
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # it wraps the step to count it
    assert may_defer(optimizer) is None


@pytest.mark.parametrize("kind", [Subclass, OurSubclass, torch.optim.Adafactor, torch.optim.LBFGS])
def test_others_may_not(kind: Any) -> None:
    assert may_defer(kind([nn.Parameter(torch.zeros(2, 2))], lr=0.1)) == f"{kind.__name__} may couple its parameters"


@pytest.mark.parametrize(
    ("kind", "setting", "name"),
    [
        (torch.optim.Adam, "fused", "Adam"),
        (torch.optim.Adam, "capturable", "Adam"),
        (Adam, "differentiable", "lightning_embrace.optim.Adam"),
    ],
)
def test_settings_that_forbid_to_defer(kind: Any, setting: str, name: str) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))], **{setting: True})
    assert may_defer(optimizer) == f"{name} has {setting}=True"


def test_hooks_other_than_known_ones_forbid_to_defer() -> None:
    """A step hook may read weights that are not updated yet."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2, 2))])
    optimizer.register_step_pre_hook(lambda *_: None)
    assert may_defer(optimizer, known_hooks=1) is None
    optimizer.register_step_post_hook(lambda *_: None)
    assert may_defer(optimizer, known_hooks=1) == "SGD has step hooks"
    assert may_defer(optimizer) == "SGD has step hooks"
    assert may_defer(optimizer, known_hooks=2) is None
    handle = register_optimizer_step_post_hook(lambda *_: None)
    assert may_defer(optimizer, known_hooks=2) == "there are step hooks for all optimizers"
    handle.remove()


def test_a_replaced_step_forbids_to_defer() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2, 2))])
    optimizer.step = MethodType(lambda self: None, optimizer)  # type: ignore[method-assign]
    assert may_defer(optimizer) == "the step of SGD was replaced"
