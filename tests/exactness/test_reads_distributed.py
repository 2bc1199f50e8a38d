"""Nothing is lost: with updates pending, whatever reads a weight, a gradient or a state sees them applied."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_embrace.tables.columns import column_ranges
from tests.exactness import story as s
from tests.exactness.story import Seen, Story, story
from tests.exactness.test_schedules_distributed import assert_on, compare, right
from tests.support.lifecycle import At, plain
from tests.support.ranks import Ranks

STEPS = 6
WORLD_SIZE = 2
TABLES = ("words.weight", "bags.weight")


class Rich(Story):
    """An LSTM, a weight that two layers share, and a ParameterDict."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.lstm = nn.LSTM(10, 4, batch_first=True)
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)
        self.second.weight = self.first.weight
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(10))})

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        x = super().features(batch)
        states, _ = self.lstm(self.words(batch["ids"]))
        return self.second(torch.tanh(self.first(x))) * self.scales["a"] + states.sum((1, 2)).unsqueeze(1)


class Listed(Rich):
    """Keeps parameters in a plain list, which its training step reads past their modules."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.more = nn.ModuleList([nn.Linear(10, 1, bias=False)])
        self.plain_list = [self.more[0].weight]

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return super().features(batch) + self.plain_list[0]


class Keeper(At):
    """Holds the parameters as averaging libraries do, and reads them after every step."""

    def __init__(self) -> None:
        super().__init__("on_train_batch_end", lambda trainer, module: [plain(p) for p in self.kept])
        self.kept: list[nn.Parameter] = []

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.kept = list(module.parameters())


# ---- what callbacks read, the same on every rank and in the reference ---------------------------------------------


def attributes(trainer: Any, module: Any) -> Any:
    """`layer.weight`, of one dense layer: nothing else needs to be there."""
    return plain(module.body[0].weight)


def table_attribute(trainer: Any, module: Any) -> Any:
    """`table.weight`: this rank's columns."""
    return plain(module.words.weight)


def parameters(trainer: Any, module: Any) -> Any:
    """`parameters()`."""
    return [plain(p) for p in module.parameters()]


def named_parameters(trainer: Any, module: Any) -> Any:
    """`named_parameters()`, and buffers."""
    return {name: plain(p) for name, p in module.named_parameters()}


def get_parameter(trainer: Any, module: Any) -> Any:
    """`get_parameter`."""
    return plain(module.get_parameter("body.2.weight"))


def kept_list(trainer: Any, module: Any) -> Any:
    """A list of parameters that the model keeps."""
    return plain(module.plain_list[0])


def tied(trainer: Any, module: Any) -> Any:
    """A weight that two layers share, through the second."""
    return plain(module.second.weight)


def flat_weights(trainer: Any, module: Any) -> Any:
    """An LSTM called by a callback."""
    with torch.no_grad():
        return module.lstm(torch.ones(1, 3, 10, dtype=torch.float64))[0]


def dense_gradients(trainer: Any, module: Any) -> Any:
    """`p.grad` after the step, of dense parameters."""
    return {n: plain(p.grad) for n, p in module.named_parameters() if n not in TABLES}


def table_gradients(trainer: Any, module: Any) -> Any:
    """`p.grad` after the step, of tables."""
    return [plain(module.words.weight.grad), plain(module.bags.weight.grad)]


def local_state(trainer: Any, module: Any) -> Any:
    """`state_dict()` of the module: DTensors, of which this rank holds columns."""
    return {k: plain(v.to_local() if hasattr(v, "to_local") else v) for k, v in module.state_dict().items()}


def full_state(trainer: Any, module: Any) -> Any:
    """`strategy.full_state_dict()`."""
    strategy = trainer.strategy
    return plain(strategy.full_state_dict() if hasattr(strategy, "full_state_dict") else module.state_dict())


def optimizer_state(trainer: Any, module: Any) -> Any:
    """`optimizer.state_dict()`."""
    return plain(trainer.optimizers[0].state_dict()["state"])


def deep_copy(trainer: Any, module: Any) -> Any:
    """A copy of a dense submodule, which has nothing of ours."""
    body = copy.deepcopy(module.body)
    assert type(body[0]._parameters) is dict or os.environ.get("LOCAL_RANK") is None
    return {k: plain(v) for k, v in body.state_dict().items()}


def clamp(trainer: Any, module: Any) -> Any:
    """Changes the weights, as WGANs do it."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-0.3, 0.3)


def take_back(trainer: Any, module: Any) -> None:
    """Loads the optimizer's state and the weights of the step before, as who starts over after a bad step does."""
    kept = module.__dict__.setdefault("kept", {})
    optimizer = trainer.optimizers[0]
    if trainer.global_step == 4:
        optimizer.load_state_dict(kept["optimizer"])
        module.body.load_state_dict(kept["body"])
    kept["optimizer"] = copy.deepcopy(optimizer.state_dict())
    kept["body"] = copy.deepcopy(module.body.state_dict())


def load_optimizer(trainer: Any, module: Any) -> None:
    """Loads an older state of the optimizer alone, without reading anything before."""
    kept = module.__dict__.setdefault("kept", {})
    if trainer.global_step == 2:
        kept["optimizer"] = copy.deepcopy(trainer.optimizers[0].state_dict())
    if trainer.global_step == 4:
        trainer.optimizers[0].load_state_dict(kept["optimizer"])


def clamp_table(trainer: Any, module: Any) -> Any:
    """Changes a table alone, through `.data`."""
    module.words.weight.data.clamp_(-0.3, 0.3)


READS = (
    attributes,
    table_attribute,
    parameters,
    named_parameters,
    get_parameter,
    tied,
    flat_weights,
    dense_gradients,
    table_gradients,
    local_state,
    full_state,
    optimizer_state,
    deep_copy,
    clamp,
    clamp_table,
    take_back,
    load_optimizer,
)


def reading(read: Callable[[Any, Any], Any], hook: str = "on_train_batch_end") -> list[Callback]:
    """Reads after every step."""
    return [At(hook, read)]


def same_columns(ours: Any, theirs: Any, rank: int, where: str = "") -> None:
    """Equal; of a table, what one rank holds are its columns."""
    if isinstance(theirs, Tensor):
        if ours.shape != theirs.shape:
            start, stop = column_ranges(theirs.shape[1], WORLD_SIZE)[rank]
            theirs = theirs[:, start:stop]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10, msg=lambda m: f"{where}: {m}")
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            same_columns(ours[key], value, rank, f"{where}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for number, value in enumerate(theirs):
            same_columns(ours[number], value, rank, f"{where}[{number}]")
    else:
        assert ours == theirs, where


def compare_reads(ranks: Callable[[int], Ranks], make: Any, callbacks: Any, schedule: str, **named: Any) -> list[Seen]:
    """Numbers of the training and what the callbacks read are those of one process."""
    data = s.drawn(STEPS, WORLD_SIZE)
    seen = compare(ranks, make, data, schedule, callbacks=callbacks, **named)
    theirs = s.in_one_process(make, data, callbacks, **named).results
    for rank, ours in enumerate(seen):
        assert len(theirs[0]) > 0
        same_columns(ours.results, theirs, rank)
    return seen


@pytest.mark.parametrize("schedule", ["2d", "vertical"])
@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_callbacks_see_the_step_that_is_over(ranks: Callable[[int], Ranks], read: Any, schedule: str) -> None:
    """Read through the model, in `on_train_batch_end`; what they change stays."""
    seen = compare_reads(ranks, story("adam", "steps", cls=Rich), functools.partial(reading, read), schedule)
    # the witness comes first: all was pending when the callback read
    assert_on(seen, schedule)


class Remembering(Rich):
    """Reads in forward the gradient of the step before: Lightning has not zeroed it by then."""

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        before = self.first.weight.grad
        return super().features(batch) * (1.0 if before is None else 1.0 + before.norm())


@pytest.mark.parametrize("schedule", ["2d", "horizontal"])
def test_the_gradient_of_the_step_before_is_there_in_forward(ranks: Callable[[int], Ranks], schedule: str) -> None:
    """It is late, and must not be taken for one that has been zeroed already."""
    data = s.drawn(STEPS, WORLD_SIZE)
    # the reference plays all ranks in one process, and its gradient too is there in every step but the first
    assert_on(compare(ranks, story("adam", "steps", cls=Remembering), data, schedule), schedule)


def keeping_list() -> list[Callback]:
    """Reads the model's own list."""
    return reading(kept_list)


def keeping() -> list[Callback]:
    """Keeps a list itself."""
    return [Keeper()]


@pytest.mark.parametrize(
    ("cls", "callbacks"), [(Listed, keeping_list), (Rich, keeping)], ids=["of the model", "of a callback"]
)
@pytest.mark.parametrize("schedule", ["2d", "vertical"])
def test_parameters_in_plain_lists(
    ranks: Callable[[int], Ranks], cls: type[Story], callbacks: Any, schedule: str
) -> None:
    """Nobody sees them being read: no update is late then. Early rows are all the same."""
    for rank in compare_reads(ranks, story("adam", "steps", cls=cls), callbacks, schedule):
        assert not any(step["relaxed"] for step in rank.steps)
        assert rank.most["blocks"] == rank.most["parts"] == 0 < rank.most["early"]


@pytest.mark.parametrize(
    ("hook", "read"),
    [
        ("on_train_batch_start", parameters),
        ("on_train_batch_start", optimizer_state),
        ("on_train_epoch_end", parameters),
        ("on_train_epoch_end", full_state),
        ("on_before_zero_grad", optimizer_state),
        ("on_before_zero_grad", attributes),
        ("on_after_backward", attributes),
        ("on_after_backward", dense_gradients),
        ("on_before_optimizer_step", table_gradients),
    ],
)
def test_other_hooks_see_it_too(ranks: Callable[[int], Ranks], hook: str, read: Any) -> None:
    """Before the next step begins, at the end of an epoch, and inside the next step on both sides of backward."""
    compare_reads(ranks, story("adam", "steps", cls=Rich), functools.partial(reading, read, hook), "2d", max_epochs=2)


# ---- files, validation, ends --------------------------------------------------------------------------------------


def saving(folder: str) -> list[Callback]:
    """Saves after every second step."""

    def save(trainer: Any, module: Any) -> Any:
        path = Path(folder) / f"{'ours' if 'LOCAL_RANK' in os.environ else 'theirs'}-{trainer.global_step}.ckpt"
        if trainer.global_step % 2 == 0:
            trainer.save_checkpoint(path)
        return trainer.global_step

    return [At("on_train_batch_end", save)]


@pytest.mark.parametrize("schedule", ["2d", "vertical", "horizontal"])
def test_checkpoints_in_the_middle(ranks: Callable[[int], Ranks], tmp_path: Path, schedule: str) -> None:
    """Weights and optimizer states in the file are those of plain training at that step."""
    make = story("adam", "one cycle", cls=Rich)
    assert_on(compare_reads(ranks, make, functools.partial(saving, str(tmp_path)), schedule), schedule)
    for step in (2, 4, 6):
        ours, theirs = (torch.load(tmp_path / f"{who}-{step}.ckpt", weights_only=False) for who in ("ours", "theirs"))
        same_columns(plain(dict(ours["state_dict"])), plain(dict(theirs["state_dict"])), 0, "state_dict")
        same_columns(plain(ours["optimizer_states"]), plain(theirs["optimizer_states"]), 0, "optimizer")


class Evaluated(Rich):
    """Validates with dense layers and tables."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        value = float(self.loss(batch))
        self.losses += [value] * (1 if "LOCAL_RANK" in os.environ else WORLD_SIZE)

    def val_dataloader(self) -> Any:
        data: Any = [step[0] for step in s.drawn(2, 1, seed=9)]
        return torch.utils.data.DataLoader(data, batch_size=None)


@pytest.mark.parametrize("schedule", ["2d", "vertical", "horizontal"])
def test_validation_sees_it(ranks: Callable[[int], Ranks], schedule: str) -> None:
    """In the middle of an epoch, and at its end."""
    make, data = story("adam", cls=Evaluated), s.drawn(STEPS, WORLD_SIZE)
    assert_on(compare(ranks, make, data, schedule, val_check_interval=2, max_epochs=2), schedule)


def stopping(how: str) -> list[Callback]:
    """Stops after the third step."""

    def stop(trainer: Any, module: Any) -> int:
        if trainer.global_step == 3:
            trainer.should_stop = True
        return trainer.global_step

    return [At("on_train_batch_end", stop)]


@pytest.mark.parametrize("schedule", ["2d", "vertical", "horizontal"])
@pytest.mark.parametrize("arguments", [{}, {"max_steps": 3}, {"limit_train_batches": 3}], ids=str)
def test_ends(ranks: Callable[[int], Ranks], arguments: dict[str, Any], schedule: str) -> None:
    """`should_stop`, `max_steps` and `limit_train_batches`, where the next batch is held and does not come."""
    callbacks = functools.partial(stopping, "should_stop") if not arguments else s.no_callbacks
    make, data = story("adam", "steps", cls=Rich), s.drawn(STEPS, WORLD_SIZE)
    seen = compare(ranks, make, data, schedule, callbacks=callbacks, **arguments)
    assert_on(seen, schedule)
    assert len(seen[0].steps) == 3


def terminated() -> list[Callback]:
    """SIGTERM on rank 1 after the second step."""

    def kill(trainer: Any, module: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return [At("on_train_batch_end", kill)]


def until_terminated(make: Any, data: s.Steps) -> tuple[int, dict[str, Tensor]]:
    """Runs in a worker: a fit that is stopped; returns the steps that it made and the model's state."""
    models: list[Any] = []

    def keeping() -> Any:
        models.append(make())
        return models[0]

    steps = At("on_train_batch_end", lambda trainer, module: trainer.global_step)
    with contextlib.suppress(SystemExit):
        s.on_rank(keeping, data, {"lookahead": right}, lambda: [*terminated(), steps])
    return steps.results[-1] if steps.results else 0, plain(dict(models[0].state_dict()))


def test_sigterm(ranks: Callable[[int], Ranks]) -> None:
    """All ranks stop alike, and the weights are those after that step."""
    make, data = story("adam", "steps", cls=Rich), s.drawn(20, WORLD_SIZE)
    ours = ranks(WORLD_SIZE).run(until_terminated, make, data)
    steps = ours[0][0]
    assert 2 <= steps < 20 and steps == ours[1][0]
    # the batch in which all learn of it is trained on
    theirs = [s.in_one_process(make, data[:n]).outcome.state for n in (steps, steps + 1)]
    close = [
        all(torch.allclose(ours[r][1][k], v, rtol=0, atol=1e-10) for r in range(2) for k, v in state.items())
        for state in theirs
    ]
    assert any(close)


class Failing(Rich):
    """Raises on rank 1 in its fourth step, in forward or in backward."""

    where = "forward"

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        x = super().features(batch)
        if self.global_step == 3 and self.global_rank == 1:
            if self.where == "forward":
                raise ArithmeticError("my step fails")
            x.register_hook(_fail)
        return x


class FailingInBackward(Failing):
    """In backward."""

    where = "backward"


def _fail(grad: Tensor) -> None:
    raise ArithmeticError("my step fails")


def failing(make: Any, data: s.Steps, schedule: str) -> tuple[str, dict[str, int]]:
    """Runs in a worker: the error, and what was pending when the witness last looked."""
    witness = s.Witness()
    try:
        s.on_rank(make, data, {"lookahead": right, "schedule": schedule}, lambda: [witness])
    except Exception as error:
        return f"{type(error).__name__}: {error}", witness.seen[-1]
    return "", {}


@pytest.mark.parametrize("schedule", ["2d", "vertical"])
@pytest.mark.parametrize("cls", [Failing, FailingInBackward])
def test_a_failing_step_drops_what_is_pending(ranks: Callable[[int], Ranks], cls: type[Story], schedule: str) -> None:
    """Nobody waits for it, and both ranks raise."""
    outcomes = ranks(WORLD_SIZE).try_run(
        failing, story("adam", cls=cls), s.drawn(STEPS, WORLD_SIZE), schedule, timeout=60.0
    )
    ranks(WORLD_SIZE).stop()  # the groups are broken
    for ok, value in outcomes:
        assert ok, value
        text, seen = value
        assert "my step fails" in text
        assert seen["parts"] > 0 and (seen["blocks"] > 0) == (schedule == "2d")
