"""Models and how they are trained, each compared with plain training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from lightning_embrace.hydra.session import Session
from tests.hydra import zoo
from tests.hydra.runs import Run, assert_same, fit, hydra


class Case(NamedTuple):
    """A model and how it is trained.

    Attributes:
        make: Builds it.
        device: Its budget: not all of its blocks fit, and two shards do.
        data: What it is trained on.
        arguments: The Trainer's, made anew for each run.
        tolerance: 0: bit by bit. Else three or more contributions to one gradient are summed, in another order.
        check: Looks at the run under Hydra.
        blocks: The strategy's.
    """

    make: Callable[[], Any]
    device: str = "80KiB"
    data: Callable[[], list[Any]] = zoo.batches
    arguments: Callable[[], dict[str, Any]] = dict
    tolerance: float = 0.0
    check: Callable[[Run], None] | None = None
    blocks: Any = "auto"


#: tier, prefetch, and whether activations are kept where there is room
PLACES = (
    ("host", True, True), ("disk", False, True), ("disk", True, False), ("host", False, True),
    ("host", True, False), ("disk", True, True),
)  # fmt: skip
_plain: dict[str, Run] = {}


def sample(cases: Iterable[str]) -> list[tuple[str, str, bool, bool]]:
    """Each case once; every sixth one on the same tier, with or without prefetch, and with or without activations."""
    return [(name, *PLACES[index % len(PLACES)]) for index, name in enumerate(cases)]


def assert_equals_plain(case: Case, name: str, folder: Path | None, prefetch: bool, keep: bool) -> None:
    """Trains twice, and sees to it that the run under Hydra was one that shows something.

    Args:
        case: What is trained.
        name: The case's; a plain run is made once for each.
        folder: Of the disk tier; None: what does not fit the device is on the host.
        prefetch: The strategy's.
        keep: Whether activations are kept where there is room, or all computed again.
    """
    tier = {"disk": folder, "host_memory": "4KiB"} if folder else {}
    strategy = hydra(device_memory=case.device, prefetch=prefetch, blocks=case.blocks, **tier)
    with nullcontext() if keep else patch.object(Session, "room", lambda *_: None):
        ours = fit(case.make, strategy, case.data(), **case.arguments())
    if name not in _plain:
        _plain[name] = fit(case.make, "auto", case.data(), **case.arguments())
    assert all(map(math.isfinite, _plain[name].losses)), "NaN equals NaN: nothing was shown"
    assert_same(ours, _plain[name], case.tolerance)
    plan = strategy.planned.plan
    assert set(plan.places) <= {"device", "disk" if folder else "host"}
    assert len(plan.shards) > plan.slots, "nothing had to make room: nothing was shown"
    assert plan.slots == (2 if prefetch else 1), f"{plan.slots} slots: nothing was shown of prefetch={prefetch}"
    if case.check is not None:
        case.check(ours)
