"""Fabric(strategy="embrace"): the numbers of Fabric's own ``ddp``, in whatever way a loop is written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_embrace import RankFailedError
from tests.exactness import story as s
from tests.fabric import loops
from tests.fabric.loops import (
    LOOPS,
    Buffered,
    Result,
    Rows,
    both,
    ids,
    launched,
    loader,
    make,
    make_strategy,
    this_rank,
)
from tests.support.lifecycle import assert_same
from tests.support.ranks import Ranks

STEPS = 8


def compare(
    ranks: Callable[[int], Ranks],
    loop: str,
    world_size: int = 2,
    schedule: str = "2d",
    lookahead: Any = ids,
    steps: int = STEPS,
    **arguments: Any,
) -> list[Result]:
    """Asserts equal weights, states and noted numbers, and returns what ``embrace`` left behind."""
    settings = {"schedule": schedule, "lookahead": lookahead}
    pairs = ranks(world_size).run(both, loop, s.drawn(steps, world_size), settings, **arguments)
    for ours, theirs in pairs:
        assert_same(ours.state, theirs.state, "weights", tolerance=1e-10)
        assert_same(ours.optimizer, theirs.optimizer, "optimizer", tolerance=1e-10)
        assert_same(ours.seen, theirs.seen, "seen", tolerance=1e-10)
        assert ours.seen, "the loop did nothing"
        assert ours.sent["rows"] > 0 and ours.sent["grads"] > 0, "no table was sharded"
    return [ours for ours, _ in pairs]


@pytest.mark.parametrize("loop", [name for name in LOOPS if name != "one_backward"])
def test_loops(ranks: Callable[[int], Ranks], loop: str) -> None:
    """Every one, with an optimizer under which rows may come early."""
    compare(ranks, loop, optimizer="adagrad")


@pytest.mark.parametrize(
    ("loop", "schedule", "optimizer"),
    [("plain", "fifo", "adam"), ("accumulating", "2d", "momentum"), ("clipped", "vertical", "adam")],
)
def test_three_ranks(ranks: Callable[[int], Ranks], loop: str, schedule: str, optimizer: str) -> None:
    """Columns that cannot be divided evenly."""
    compare(ranks, loop, 3, schedule, optimizer=optimizer)


@pytest.mark.parametrize("loop", ["plain", "accumulating", "evaluating"])
def test_buffers(ranks: Callable[[int], Ranks], loop: str) -> None:
    """Every forward pass has rank 0's, also one without gradients, but not while gradients accumulate."""
    compare(ranks, loop, cls=Buffered)


def test_module_and_optimizer_apart(ranks: Callable[[int], Ranks]) -> None:
    """`setup_module`, then an optimizer on its parameters, then `setup_optimizers`."""
    compare(ranks, "plain", apart=True)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("loop", "world_size", "schedule", "lookahead", "optimizer"),
    [
        (loop, *rest)
        for loop in LOOPS
        for rest in itertools.product(
            (2, 3), ("2d", "horizontal", "vertical", "fifo"), (ids, "auto", "off"), loops.OPTIMIZERS
        )
        if loop != "one_backward"
    ],
)
def test_all(
    ranks: Callable[[int], Ranks], loop: str, world_size: int, schedule: str, lookahead: Any, optimizer: str
) -> None:
    """The full product."""
    compare(ranks, loop, world_size, schedule, lookahead, optimizer=optimizer)


# ---- what is known of the next batch -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loop", "early"), [("plain", True), ("accumulating", True), ("noisy", True), ("never_zeroing", False)]
)
def test_rows_come_before_they_are_looked_up(ranks: Callable[[int], Ranks], loop: str, early: bool) -> None:
    """A loader of `setup_dataloaders` tells its next batch, also where a loop changes gradients behind our back.

    Where gradients of earlier steps stay, rows that this step leaves alone move all the same: none that came early is
    used.
    """
    for ours in compare(ranks, loop, optimizer="adagrad", steps=12):
        assert ours.rows["planned"] > 0
        assert (ours.rows["early"] > 0) == early, ours.rows


def test_it_learns_what_is_looked_up(ranks: Callable[[int], Ranks]) -> None:
    """`lookahead="auto"`."""
    for ours in compare(ranks, "plain", lookahead="auto", steps=10):
        assert ours.rows["planned"] > 0


@pytest.mark.parametrize(("schedule", "lookahead"), [("fifo", "auto"), ("2d", "off")])
def test_nothing_is_told_where_nobody_wants_to_know(
    ranks: Callable[[int], Ranks], schedule: str, lookahead: str
) -> None:
    """Loaders stay what they are, and no ids travel beforehand."""
    for ours in compare(ranks, "plain", schedule=schedule, lookahead=lookahead, steps=3):
        assert ours.rows == {"early": 0, "planned": 0}


def test_bytes(ranks: Callable[[int], Ranks]) -> None:
    """A loop that looks rows up twice sends each once, whatever comes early."""
    sent = [
        [ours.sent for ours in compare(ranks, "plain", schedule=schedule, optimizer="adagrad", cls=Rows)]
        for schedule in ("2d", "fifo")
    ]
    for ahead, plain in zip(*sent):
        assert {k: ahead[k] for k in ("rows", "grads", "dense")} == {k: plain[k] for k in ("rows", "grads", "dense")}


# ---- saving and loading ------------------------------------------------------------------------------------------


def save(path: str, name: str, optimizer: str) -> None:
    """Runs in a worker: trains and saves in the middle of a loop."""
    fabric = launched(make_strategy(name), 2)
    model, made = fabric.setup(module := make(), loops.OPTIMIZERS[optimizer](module.parameters()))
    seen: list[Any] = []
    LOOPS["plain"](loops.Tools(fabric, model, made, loader(s.drawn(3, 2)), seen))
    fabric.save(path, {"model": model, "optimizer": made, "step": 3, "nested": {"a": torch.ones(2)}})
    if name == "embrace":
        assert_same(made.state_dict()["param_groups"], made.optimizer.state_dict()["param_groups"])
        fabric.strategy.teardown()


def resume(path: str, name: str, optimizer: str) -> Result:
    """Runs in a worker: goes on from a file."""
    fabric = launched(make_strategy(name), 2)
    model, made = fabric.setup(module := make(), loops.OPTIMIZERS[optimizer](module.parameters()))
    state = {"model": model, "optimizer": made, "step": 0}
    rest = fabric.load(path, state)
    assert state["step"] == 3 and list(rest) == ["nested"]
    seen: list[Any] = []
    LOOPS["plain"](loops.Tools(fabric, model, made, loader(s.drawn(3, 2, seed=8)), seen))
    if name == "embrace":
        whole = fabric.strategy.full_state_dict()
        assert {k: tuple(v.shape) for k, v in whole.items()} == {
            k: tuple(v.shape) for k, v in make().state_dict().items()
        }
        fabric.strategy.teardown()
    return Result(dict(module.state_dict()), made.optimizer.state_dict(), seen, {}, {})


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_files_are_those_of_ddp(ranks: Callable[[int], Ranks], tmp_path: Any, optimizer: str) -> None:
    """The same keys, shapes and numbers; and either goes on from the other's."""
    paths = {name: str(tmp_path / f"{name}.ckpt") for name in ("embrace", "ddp")}
    for name, path in paths.items():
        ranks(2).run(save, path, name, optimizer)
    files = [torch.load(path, weights_only=True) for path in paths.values()]
    assert_same(*files, tolerance=1e-10)
    crossed = [ranks(2).run(resume, paths[a], b, optimizer) for a, b in (("ddp", "embrace"), ("embrace", "ddp"))]
    for ours, theirs in zip(*crossed):
        assert_same(ours, theirs, tolerance=1e-10)


def filtered(path: str) -> None:
    """Runs in a worker."""
    fabric = launched(make_strategy("embrace"), 2)
    model = fabric.setup(make())
    fabric.save(path, {"model": model}, filter={"model": lambda name, _: "words" in name})
    fabric.strategy.teardown()


def test_a_filter(ranks: Callable[[int], Ranks], tmp_path: Any) -> None:
    """Of `fabric.save`."""
    ranks(2).run(filtered, str(tmp_path / "some.ckpt"))
    state = torch.load(tmp_path / "some.ckpt", weights_only=True)["model"]
    assert list(state) == ["words.weight"]
    torch.testing.assert_close(state["words.weight"], make().state_dict()["words.weight"])


# ---- look-ups of one rank ----------------------------------------------------------------------------------------


def alone(data: s.Steps) -> Tensor | None:
    """Runs in a worker: rank 0 evaluates between steps, which under ddp needs nobody."""
    fabric = launched(make_strategy("embrace"), 2)
    model, made = fabric.setup(module := make(), loops.OPTIMIZERS["adam"](module.parameters()))
    found = None
    for batch in loader(data):
        made.zero_grad()
        fabric.backward(model(batch["ids"], batch["more"]).sum())
        made.step()
        if this_rank() == 0:
            with torch.no_grad():
                found = model(batch["ids"], batch["more"])
    fabric.strategy.teardown()
    if found is not None:
        with torch.no_grad():
            batch = data[-1][0]
            torch.testing.assert_close(found, module(batch["ids"], batch["more"]), rtol=0, atol=1e-12)
    return found


def test_one_rank_evaluates_by_itself(ranks: Callable[[int], Ranks]) -> None:
    """Its look-ups are served."""
    assert [found is not None for found in ranks(2).run(alone, s.drawn(4, 2))] == [True, False]


def one_rank() -> None:
    """Runs in a worker."""
    fabric = launched(make_strategy("embrace"), 1)
    model, made = fabric.setup(module := make(), loops.OPTIMIZERS["adam"](module.parameters()))
    LOOPS["accumulating"](loops.Tools(fabric, model, made, loader(s.drawn(4, 1)), []))
    fabric.strategy.teardown()


def test_one_rank_is_no_special_case(ranks: Callable[[int], Ranks]) -> None:
    """`devices=1`."""
    ranks(1).run(one_rank)


# ---- what is refused ---------------------------------------------------------------------------------------------


def refusals() -> list[str]:
    """Runs in a worker: every mistake that leaves the ranks able to go on is made, one after the other."""
    fabric = launched(make_strategy("embrace"), 2)
    told: list[str] = []

    def refused(action: Callable[[], Any]) -> None:
        try:
            action()
        except (RuntimeError, TypeError, ValueError) as error:
            told.append(str(error))
        else:
            told.append("not refused")

    model, made = fabric.setup(module := make(), loops.OPTIMIZERS["adam"](module.parameters()))
    batch = s.drawn(1, 2)[0][this_rank()]
    loss = model(batch["ids"], batch["more"]).sum()
    refused(loss.backward)
    refused(lambda: module.words.weight)
    with pytest.raises(TypeError, match=r"module that fabric\.setup"):
        fabric.strategy._backward_sync_control.no_backward_sync(module, True).__enter__()
    fabric.backward(loss)
    made.zero_grad()
    made.param_groups[0]["params"][0].grad = None
    next(module.body.parameters()).grad = torch.full((7, 10), math.inf, dtype=torch.float64)
    refused(lambda: fabric.clip_gradients(model, made, max_norm=1.0))
    made.zero_grad()
    fabric.strategy.teardown()
    return told


def test_mistakes(ranks: Callable[[int], Ranks]) -> None:
    """`loss.backward()`, a sharded weight in a step, a norm that is infinite."""
    for told in ranks(2).run(refusals):
        backward, weight, norm = told
        assert "fabric.backward(loss)" in backward
        assert "`words.weight` was read inside a step" in weight
        assert "is non-finite" in norm


def second_module() -> None:
    """Runs in a worker."""
    fabric = launched(make_strategy("embrace"), 2)
    fabric.setup(make())
    fabric.setup(nn.Linear(2, 2))


def early_optimizer() -> None:
    """Runs in a worker."""
    fabric = launched(make_strategy("embrace"), 2)
    fabric.setup_optimizers(torch.optim.Adam(make().parameters()))


def coupling() -> None:
    """Runs in a worker."""
    fabric = launched(make_strategy("embrace"), 2)
    fabric.setup(module := make(), torch.optim.Adafactor(module.parameters()))


def scaled() -> None:
    """Runs in a worker."""
    plugin = MixedPrecision("16-mixed", "cpu")
    fabric = launched(make_strategy("embrace"), 2, plugins=[plugin])
    fabric.setup(make())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (second_module, "A second module was given to fabric.setup()"),
        (early_optimizer, "was called before fabric.setup_module()"),
        (coupling, "is sharded by columns, and torch.optim"),
        (scaled, "scales the loss"),
    ],
)
def test_refused_on_every_rank(ranks: Callable[[int], Ranks], function: Callable[[], None], message: str) -> None:
    """Before anything is trained."""
    for ok, text in ranks(2).try_run(function, timeout=40.0):
        assert not ok and message in text


def failing(data: s.Steps) -> None:
    """Runs in a worker: one rank's ids are no ids in the third step."""
    fabric = launched(make_strategy("embrace"), 2)
    model, made = fabric.setup(module := make(), loops.OPTIMIZERS["adam"](module.parameters()))
    for number, batch in enumerate(loader(data)):
        made.zero_grad()
        if number == 2 and this_rank() == 1:
            batch = {**batch, "ids": batch["ids"].double()}
        fabric.backward(model(batch["ids"], batch["more"]).sum())
        made.step()


def test_a_rank_that_fails_is_named(ranks: Callable[[int], Ranks]) -> None:
    """The others raise, and say which one it was."""
    (ok, text), (failed_ok, failed) = ranks(2).try_run(failing, s.drawn(5, 2), timeout=40.0)
    assert not ok and RankFailedError.__name__ in text and "rank 1 failed" in text
    assert not failed_ok and "must be int32 or int64" in failed
