"""All schedules, with everything late that may be, and every kind of look-ahead: the numbers of one process."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from tests.exactness import story as s
from tests.exactness.story import ROWS, Seen, Steps, story
from tests.support.lifecycle import At
from tests.support.ranks import Ranks
from tests.support.training import assert_equal

SCHEDULES = ("2d", "horizontal", "vertical", "fifo")
STEPS = 12

# ---- what a user's function may say ------------------------------------------------------------------------------


def right(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model looks up."""
    return {"words": torch.cat([batch["ids"], batch["more"]]), "bags": batch["more"]}


def wrong_ids(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other ids than those that will be looked up."""
    return {name: (ids + 1) % ROWS for name, ids in right(batch).items()}


def missing_ids(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Half of them."""
    return {name: ids[: len(ids) // 2] for name, ids in right(batch).items()}


def wrong_on_rank_1(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Right on the others."""
    return (wrong_ids if os.environ.get("LOCAL_RANK") == "1" else right)(batch)


def superset(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some more, and some out of range."""
    extra = torch.tensor([[-100, 1], [ROWS - 1, ROWS + 5]])
    return {name: torch.cat([ids, extra]) for name, ids in right(batch).items()}


def nothing(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Does not know."""
    return {}


def no_rows(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Says that nothing will be looked up."""
    return {name: ids[:0] for name, ids in right(batch).items()}


def one_table_on_rank_0(batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """Rank 0 knows of one table only."""
    told = right(batch)
    return {"words": told["words"]} if os.environ.get("LOCAL_RANK") == "0" else told


# ---- comparing ---------------------------------------------------------------------------------------------------


def compare(
    ranks: Callable[[int], Ranks],
    make: Callable[[], Any],
    data: Steps,
    schedule: str = "2d",
    *,
    lookahead: Any = right,
    tolerance: float = 1e-10,
    lengths: tuple[int, ...] | None = None,
    strategy: dict[str, Any] | None = None,
    **arguments: Any,
) -> list[Seen]:
    """Trains on as many ranks as the data are for, and in one process; asserts that the numbers are equal."""
    world_size = len(data[0])
    plain = s.in_one_process(make, data[: min(lengths)] if lengths else data, **arguments)
    settings = {"schedule": schedule, "lookahead": lookahead, **(strategy or {})}
    seen = ranks(world_size).run(s.on_rank, make, data, settings, lengths=lengths, **arguments)
    for rank, ours in enumerate(seen):
        losses = plain.outcome.losses[rank::world_size]
        assert_equal(ours.outcome, plain.outcome._replace(losses=losses), tolerance)
    return seen


def assert_on(seen: list[Seen], schedule: str, delayed: bool = True, early: bool = True) -> None:
    """What the schedule is there for happened on every rank, and what it leaves out did not."""
    horizontal, vertical = schedule in ("2d", "horizontal"), schedule in ("2d", "vertical")
    for rank in seen:
        assert (rank.most["blocks"] > 0) == horizontal, rank.most
        assert (rank.most["delayed"] > 0) == (vertical and delayed), rank.most
        assert rank.most["parts"] > 0 or not (vertical and delayed), rank.most
        came_early = rank.most["early"] + rank.most["in vain"]
        assert (came_early > 0) == (vertical and early), rank.most
        planned = any(step["planned"] for step in rank.steps)
        assert planned == (schedule != "fifo")
        assert all(all(step["foreseen"].values()) for step in rank.steps), "a look-up was not foreseen"


# ---- tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(ranks: Callable[[int], Ranks], schedule: str, world_size: int) -> None:
    """Each does what it says, with momentum that a wrong step count or a lost row would show."""
    assert_on(compare(ranks, story("adam"), s.drawn(STEPS, world_size), schedule), schedule)


@pytest.mark.parametrize(
    ("optimizer", "sparse", "splits"),
    [
        ("adamw", True, True),
        ("momentum", True, True),
        ("adagrad", True, True),
        ("torch adagrad", True, True),
        ("torch sgd", False, True),
        ("torch adagrad", False, True),
        ("adagrad", False, True),
        ("torch adam", False, False),
        ("momentum", False, False),
    ],
)
def test_optimizers(ranks: Callable[[int], Ranks], optimizer: str, sparse: bool, splits: bool) -> None:
    """Those whose rows without gradient stay where they are split, the others move every row at once."""
    seen = compare(ranks, story(optimizer, sparse=sparse), s.drawn(STEPS, 3))
    assert_on(seen, "2d", delayed=splits, early=splits)


@pytest.mark.parametrize(
    ("schedule", "optimizer", "rate"),
    [
        ("2d", "adam", "one cycle"),
        ("vertical", "momentum", "one cycle"),
        ("horizontal", "adamw", "one cycle"),
        ("2d", "adagrad", "steps"),
        ("vertical", "adamw", "steps"),
        ("2d", "momentum", "lambda"),
        ("horizontal", "adam", "lambda"),
    ],
)
def test_changing_learning_rates(ranks: Callable[[int], Ranks], schedule: str, optimizer: str, rate: str) -> None:
    """What is late has the rate, and the momentum, of the step that produced it."""
    assert_on(compare(ranks, story(optimizer, rate), s.drawn(STEPS, 2), schedule), schedule)


@pytest.mark.parametrize(
    ("schedule", "every", "optimizer"),
    [("2d", 2, "adam"), ("2d", 3, "momentum"), ("vertical", 3, "adamw"), ("horizontal", 2, "adamw")],
)
def test_accumulation(ranks: Callable[[int], Ranks], schedule: str, every: int, optimizer: str) -> None:
    """Rows are touched by any batch of a window, whose last one may be incomplete; over two epochs."""
    data = s.drawn(11, 2)
    make = story(optimizer, "one cycle")
    assert_on(compare(ranks, make, data, schedule, accumulate_grad_batches=every, max_epochs=2), schedule)


@pytest.mark.parametrize("schedule", ["2d", "vertical", "horizontal"])
def test_two_hundred_steps(ranks: Callable[[int], Ranks], schedule: str) -> None:
    """Nothing adds up."""
    assert_on(compare(ranks, story("adam", "steps"), s.drawn(200, 2), schedule), schedule)


#: by function: does rank 1 find all it looks up, and are there plans at all
FUNCTIONS: dict[str, tuple[Any, bool, bool]] = {
    "superset": (superset, True, True),
    "wrong ids": (wrong_ids, False, True),
    "missing ids": (missing_ids, False, True),
    "wrong on rank 1": (wrong_on_rank_1, False, True),
    "no rows": (no_rows, False, True),
    "nothing": (nothing, True, False),
    "one table on rank 0": (one_table_on_rank_0, True, True),
}


@pytest.mark.parametrize(
    ("schedule", "told"),
    [*itertools.product(["2d", "vertical"], FUNCTIONS), ("horizontal", "wrong ids"), ("fifo", "wrong ids")],
)
def test_a_look_ahead_is_never_wrong(ranks: Callable[[int], Ranks], schedule: str, told: str) -> None:
    """What was not foreseen, or foreseen on some ranks only, is fetched when it is looked up."""
    function, right_on_rank_1, planned = FUNCTIONS[told]
    seen = compare(ranks, story("momentum", "steps"), s.drawn(STEPS, 3), schedule, lookahead=function)
    ahead = schedule != "fifo"
    assert any(step["planned"] for step in seen[1].steps) == (planned and ahead)
    assert all(all(step["foreseen"].values()) for step in seen[1].steps) == (right_on_rank_1 or not ahead)
    vertical = schedule in ("2d", "vertical")
    assert (seen[1].most["delayed"] > 0) == (planned and vertical)
    assert (seen[1].most["early"] > 0) == (planned and vertical and told != "no rows")


@pytest.mark.parametrize("schedule", ["2d", "vertical", "horizontal"])
def test_it_learns_what_is_looked_up(ranks: Callable[[int], Ranks], schedule: str) -> None:
    """`lookahead="auto"`: after some steps."""
    seen = compare(ranks, story("adam"), s.drawn(STEPS, 2), schedule, lookahead="auto")
    assert_on(seen, schedule)
    assert seen[0].steps[0]["planned"] == [] and seen[0].steps[-2]["planned"] == [0, 1]


@pytest.mark.parametrize("schedule", ["2d", "vertical"])
def test_without_look_ahead_every_row_is_prior(ranks: Callable[[int], Ranks], schedule: str) -> None:
    """`lookahead="off"`."""
    seen = compare(ranks, story("adam"), s.drawn(STEPS, 2), schedule, lookahead="off")
    for rank in seen:
        assert rank.most["delayed"] == rank.most["early"] == 0
        assert (rank.most["blocks"] > 0) == (schedule == "2d")


@pytest.mark.parametrize("schedule", ["2d", "vertical", "horizontal"])
@pytest.mark.parametrize("data", [s.same, s.disjoint], ids=["the same", "disjoint"])
def test_ids_that_all_stay_and_that_all_change(
    ranks: Callable[[int], Ranks], data: Callable[[int, int], Steps], schedule: str
) -> None:
    """All rows are prior and none early, or all delayed but those of the last step, and all early."""
    seen = compare(ranks, story("adam", "one cycle"), data(STEPS, 3), schedule)
    # the last step has no next one, where everything is delayed
    changes = data is s.disjoint
    assert_on(seen, schedule, early=changes, delayed=changes)
    if changes and schedule != "horizontal":
        middle = seen[0].steps[3]
        assert middle["prior"] == 0 and middle["rest"] == 0


@pytest.mark.parametrize("lookahead", ["auto", right])
def test_a_rank_without_samples(ranks: Callable[[int], Ranks], lookahead: Any) -> None:
    """It looks up no rows, and is told to delay none."""
    seen = compare(ranks, story("adam"), s.with_empty(STEPS, 3), lookahead=lookahead)
    assert_on(seen, "2d")


@pytest.mark.parametrize(("columns", "schedule"), [(2, "2d"), (2, "vertical"), (1, "2d")])
def test_fewer_columns_than_ranks(ranks: Callable[[int], Ranks], columns: int, schedule: str) -> None:
    """A rank that owns none is told nobody's ids; its own rows are delayed all the same."""
    seen = compare(ranks, story("adam", "steps", columns=columns), s.drawn(STEPS, 3), schedule)
    assert_on(seen, schedule, early=False)


@pytest.mark.parametrize("schedule", ["2d", "vertical"])
def test_tables_of_different_precision(ranks: Callable[[int], Ranks], schedule: str) -> None:
    """Their delayed rows travel in messages of their own."""
    seen = compare(
        ranks,
        story("adam", cls=s.Precise),
        s.drawn(STEPS, 2),
        schedule,
        lookahead=precise,
        tolerance=1e-5,
    )
    assert_on(seen, schedule)
    assert max(step["parts"] for step in seen[0].steps) == 3


def precise(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """For the model with a third table."""
    return {**right(batch), "coarse": batch["ids"]}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_loaders_that_end_at_different_steps(ranks: Callable[[int], Ranks], sized: bool, schedule: str) -> None:
    """All stop where the first one ends, in each of three epochs; accumulation closes its window there."""
    lengths = (9, 7, 8)
    arguments: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": 2, "unsized": not sized}
    seen = compare(ranks, story("adam"), s.drawn(9, 3), schedule, lengths=lengths, **arguments)
    assert_on(seen, schedule)
    assert [len(rank.steps) for rank in seen] == [21, 21, 21]


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_loaders_of_unequal_length_are_refused_if_so_wanted(ranks: Callable[[int], Ranks], sized: bool) -> None:
    """`uneven_loaders="raise"`, with updates pending when it does."""
    strategy = {"uneven_loaders": "raise", "lookahead": right}
    outcomes = ranks(2).try_run(s.on_rank, story("adam"), s.drawn(6, 2), strategy, lengths=(6, 4), unsized=not sized)
    for ok, text in outcomes:
        assert not ok and "batches" in text


class Evaluated(s.Story):
    """Looks rows up in validation, in the middle of an epoch."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        value = self.body(self.features(batch)).sum()
        self.log("val", value, on_epoch=True)
        self.losses += [float(value)] * (1 if "LOCAL_RANK" in os.environ else 2)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([step[0] for step in s.drawn(2, 1, seed=9)], batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_validation_in_the_middle_of_an_epoch(ranks: Callable[[int], Ranks], schedule: str) -> None:
    """Its look-ups see all that is pending, and the rows that came early for the next step stay right."""
    seen = compare(ranks, story("adam", cls=Evaluated), s.drawn(STEPS, 2), schedule, val_check_interval=4)
    assert_on(seen, schedule)


def look(trainer: Any, module: Any) -> list[Tensor]:
    """A look-up on rank 0 alone; in the reference, that is the only one."""
    if trainer.global_rank != 0:
        return []
    with torch.no_grad():
        return [module.words(torch.arange(ROWS)).clone(), module.bags(torch.arange(ROWS).view(-1, 2)).clone()]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_look_up_of_one_rank_between_steps(ranks: Callable[[int], Ranks], schedule: str) -> None:
    """Owners answer with what is pending applied, whenever they are asked."""
    callbacks = functools.partial(looking, 1)
    make, data = story("adam", "steps"), s.drawn(STEPS, 3)
    seen = compare(ranks, make, data, schedule, callbacks=callbacks)
    assert_on(seen, schedule)
    for ours, theirs in zip(seen[0].results[0], s.in_one_process(make, data, callbacks).results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def looking(_: int) -> list[Any]:
    """The callback."""
    return [At("on_train_batch_end", look)]


@pytest.mark.parametrize("schedule", ["2d", "vertical"])
def test_clipping_by_value(ranks: Callable[[int], Ranks], schedule: str) -> None:
    """It needs whole gradients: nothing is delayed. torch clips dense gradients only."""
    seen = compare(
        ranks,
        story("torch sgd", sparse=False),
        s.drawn(STEPS, 2),
        schedule,
        gradient_clip_val=0.02,
        gradient_clip_algorithm="value",
    )
    for rank in seen:
        assert rank.most["delayed"] == rank.most["blocks"] == 0
        assert not any(step["relaxed"] for step in rank.steps)


class EverySecond(s.Story):
    """Steps after every second batch without telling Lightning; the gradient of both is in `grad`."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Noisy(s.Story):
    """Adds to the gradients of all rows before the optimizer steps."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(0.01)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("cls", [EverySecond, Noisy])
def test_hooks_that_move_other_rows_than_those_looked_up(
    ranks: Callable[[int], Ranks], cls: type[s.Story], schedule: str
) -> None:
    """Rows of an earlier step's gradient, or all: none may have been sent early."""
    seen = compare(ranks, story("torch adagrad", sparse=False, cls=cls), s.drawn(STEPS, 2), schedule)
    for rank in seen:
        assert not any(step["relaxed"] for step in rank.steps)
        assert rank.most["delayed"] == rank.most["blocks"] == rank.most["early"] == 0


class _Watcher(Callback):
    """Could change gradients, as far as anybody can tell."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        pass


def on_rank_0_alone() -> list[Callback]:
    """As loggers are added."""
    return [_Watcher()] if os.environ.get("LOCAL_RANK") == "0" else []


def test_ranks_with_different_callbacks_agree(ranks: Callable[[int], Ranks]) -> None:
    """What one rank fears holds for all: they would pair different exchanges. Whether to wait is each rank's affair."""
    seen = compare(ranks, story("adam"), s.drawn(STEPS, 2), callbacks=on_rank_0_alone)
    for rank in seen:
        assert rank.most["delayed"] == rank.most["early"] == 0
    assert [rank.most["blocks"] > 0 for rank in seen] == [False, True]
