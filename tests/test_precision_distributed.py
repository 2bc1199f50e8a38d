"""Every precision trains as under ddp; with loss scaling all ranks skip the same steps and keep equal scales."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_embrace.schedule.order import Name
from tests.support.lifecycle import make_strategy, make_trainer, plain, this_rank
from tests.support.models import OPTIMIZERS, VOCABULARY, batches
from tests.support.ranks import Ranks

STEPS = 8
#: a scale at which nothing overflows, of a scaler that grows it after three steps
CALM = {"init_scale": 2.0**8, "growth_interval": 3}
#: largest difference from ddp, relative and absolute. Half precision: both round gradients that differ in the last bit
#: of fp32, and now and then to neighbours. A step moves a weight by the optimizer's rate times a gradient below one.
BOUNDS = {
    "64-true": (0.0, 1e-10),
    "32-true": (1e-6, 1e-7),
    "bf16-mixed": (0.0, 5e-4),
    "16-mixed": (0.0, 1e-4),
    "bf16-true": (0.0, 4e-2),
    "16-true": (0.0, 5e-3),
}


class Halves(LightningModule):
    """Two tables and dense layers, in fp32 unless Lightning converts them.

    Args:
        sparse: For the tables.
        optimizer: A key of ``OPTIMIZERS``.
        columns: For the tables.
    """

    def __init__(self, sparse: bool = False, optimizer: str = "momentum", columns: int = 10) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.words = nn.Embedding(VOCABULARY, columns, sparse=sparse, padding_idx=0)
        self.bags = nn.EmbeddingBag(VOCABULARY, columns, sparse=sparse, mode="mean")
        self.body = nn.Sequential(nn.Linear(columns, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.steps = 0

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = torch.tanh(self.words(batch["ids"]).mean(1) + self.bags(batch["ids"]))
        loss = (self.body(x).squeeze(1) - batch["target"].to(x.dtype)).pow(2).mean()
        if "boost" in batch:  # reaches one column of one table alone
            loss = loss + batch["boost"].to(x.dtype) * self.words(batch["ids"])[..., 0].sum()
        return loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.losses.append(float(self.loss(batch)))

    def on_train_batch_end(self, *_: Any) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        self.scales.append(scaler.get_scale() if scaler is not None else 1.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.counted(OPTIMIZERS[self.optimizer](self.parameters()))

    def counted(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Steps that were made: those that a scaler skipped are not."""

        def count(*_: Any) -> None:
            self.steps += 1

        optimizer.register_step_post_hook(count)
        return optimizer


class Left(NamedTuple):
    """What a fit leaves behind on a rank."""

    state: dict[str, Tensor]
    optimizers: list[Any]
    losses: list[float]
    scales: list[float]
    steps: int
    scaler: Any


def precise(precision: str, scaler: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of a Trainer. Of ``16-mixed`` on a CPU Lightning would make ``bf16-mixed``."""
    if precision != "16-mixed":
        return {"precision": precision}
    made = torch.amp.GradScaler("cpu", **(CALM if scaler is None else scaler))
    return {"plugins": [MixedPrecision("16-mixed", "cpu", made)]}


def quiet(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    """This rank's batches, of which none overflows."""
    return [step[rank] for step in batches(STEPS, world_size)]


def boosted(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    """In its third and sixth step the last rank's gradient is beyond fp32 once it is scaled."""
    data = quiet(rank, world_size)
    for number, batch in enumerate(data):
        loud = rank == world_size - 1 and number in (2, 5)
        batch["boost"] = torch.tensor(1e37 if loud else 0.0, dtype=torch.float64)
    return data


def fit(
    strategy: str,
    precision: str,
    make: Callable[[], Any],
    world_size: int,
    options: dict[str, Any] | None = None,
    data: Callable[[int, int], Any] = quiet,
    scaler: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    validate: bool = False,
    **arguments: Any,
) -> Left:
    """Runs in a worker."""
    seed_everything(1, verbose=False)
    model = make()
    trainer = make_trainer(
        make_strategy(strategy, **(options or {})), world_size, **arguments, **precise(precision, scaler)
    )
    mine: Any = data(this_rank(), world_size)
    loaders = [DataLoader(part, batch_size=None) for part in ([mine, mine[:2]] if validate else [mine])]
    trainer.fit(model, *loaders, ckpt_path=ckpt_path)
    plugin = trainer.precision_plugin
    made = getattr(plugin, "scaler", None)
    assert not {"clip_grad_by_norm", "clip_grad_by_value"} & vars(plugin).keys(), "the plugin is the user's again"
    assert made is None or "_unscale_grads_" not in vars(made), "the scaler is the user's again"
    return Left(
        plain(dict(model.state_dict())),
        [plain(copy.deepcopy(o.state_dict()["state"])) for o in trainer.optimizers],
        model.losses,
        model.scales,
        model.steps,
        None if made is None else made.state_dict(),
    )


def assert_near(ours: list[Left], theirs: list[Left], precision: str) -> float:
    """Equal within the bounds of a precision; steps, scales and dtypes exactly. Returns the largest difference."""
    relative, absolute = BOUNDS[precision]
    largest = 0.0
    for mine, others in zip(ours, theirs, strict=True):
        assert (mine.steps, mine.scales, mine.scaler) == (others.steps, others.scales, others.scaler)
        assert mine.state.keys() == others.state.keys()
        pairs = [(mine.state[key], value) for key, value in others.state.items()]
        for left, right in zip(mine.optimizers, others.optimizers, strict=True):
            pairs += [(left[n][k], v) for n in right for k, v in right[n].items() if isinstance(v, Tensor)]
        pairs.append((torch.tensor(mine.losses).double(), torch.tensor(others.losses).double()))
        for left, right in pairs:
            assert left.dtype == right.dtype and left.shape == right.shape
            torch.testing.assert_close(left, right, rtol=relative, atol=absolute)
            largest = max(largest, float((left.double() - right.double()).abs().max()))
    return largest


def compare(ranks: Callable[[int], Ranks], precision: str, make: Callable[[], Any], world_size: int, **how: Any) -> Any:
    """Trains under both strategies; returns what ours left behind."""
    options, reference = how.pop("options", {}), how.pop("reference", make)
    theirs = ranks(world_size).run(fit, "ddp", precision, reference, world_size, **how)
    ours = ranks(world_size).run(fit, "embrace", precision, make, world_size, options=options, **how)
    assert_near(ours, theirs, precision)
    return ours


def halves(*arguments: Any, cls: type[Halves] = Halves, **named: Any) -> Callable[[], Halves]:
    """Builds the model; can be pickled."""
    return functools.partial(cls, *arguments, **named)


#: precision, sparse tables, optimizer, N, D, schedule
SAMPLE: list[tuple[str, bool, str, int, int, Name]] = [
    ("64-true", False, "adam", 2, 10, "2d"),
    ("32-true", False, "momentum", 3, 10, "2d"),
    ("32-true", True, "adagrad", 2, 10, "fifo"),
    ("bf16-mixed", False, "momentum", 2, 10, "2d"),
    ("bf16-mixed", True, "our momentum", 3, 2, "fifo"),
    ("16-mixed", False, "momentum", 3, 10, "fifo"),
    ("16-mixed", True, "our momentum", 2, 10, "2d"),
    ("16-mixed", True, "adagrad", 3, 2, "2d"),
    ("bf16-true", False, "sgd", 3, 10, "2d"),
    ("bf16-true", True, "sgd", 2, 10, "fifo"),
    ("16-true", False, "sgd", 2, 10, "fifo"),
    ("16-true", True, "sgd", 3, 10, "2d"),
]


def check(
    ranks: Callable[[int], Ranks],
    precision: str,
    sparse: bool,
    optimizer: str,
    world_size: int,
    columns: int,
    schedule: Name,
) -> list[Left]:
    make = halves(sparse, optimizer, columns)
    # torch does not add sparse gradients in fp16 on CPUs; plain SGD moves dense ones alike
    reference = halves(sparse and precision != "16-true", optimizer, columns)
    return compare(ranks, precision, make, world_size, reference=reference, options={"schedule": schedule})


@pytest.mark.parametrize(("precision", "sparse", "optimizer", "world_size", "columns", "schedule"), SAMPLE)
def test_equals_ddp(
    ranks: Callable[[int], Ranks],
    precision: str,
    sparse: bool,
    optimizer: str,
    world_size: int,
    columns: int,
    schedule: Name,
) -> None:
    """Parameters, optimizer states and losses, within what the precision rounds away; scales and steps exactly."""
    ours = check(ranks, precision, sparse, optimizer, world_size, columns, schedule)
    assert all(left.steps == STEPS for left in ours)
    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
    assert ours[0].state["words.weight"].dtype == dtype.get(precision, torch.float32)


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", get_args(Name))
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("precision", BOUNDS)
def test_equals_ddp_everywhere(
    ranks: Callable[[int], Ranks], precision: str, sparse: bool, world_size: int, schedule: Name
) -> None:
    """The same for every precision, kind of table, number of ranks and schedule."""
    for columns in (2, 10):
        check(ranks, precision, sparse, "sgd", world_size, columns, schedule)


# ---- loss scaling ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "schedule", "sparse"), [(2, "2d", False), (3, "fifo", False), (2, "fifo", True), (3, "2d", True)]
)
def test_one_rank_overflows(ranks: Callable[[int], Ranks], world_size: int, schedule: Name, sparse: bool) -> None:
    """In a column that one rank alone owns: the others would step, on another scale from then on."""
    make = halves(sparse, "adagrad" if sparse else "momentum")
    ours = compare(ranks, "16-mixed", make, world_size, data=boosted, options={"schedule": schedule})
    for left in ours:
        assert left.steps == STEPS - 2
        assert left.scales == [256, 256, 128, 128, 128, 64, 64, 64]
        assert left.scaler == ours[0].scaler
        assert all(torch.equal(value, ours[0].state[key]) for key, value in left.state.items())
        assert all(value.isfinite().all() for value in left.state.values())


def test_a_scale_that_has_to_be_found(ranks: Callable[[int], Ranks]) -> None:
    """torch's own first scale: fp16 gradients overflow on all ranks until it is low enough."""
    ours = compare(ranks, "16-mixed", halves(), 2, scaler={"init_scale": 2.0**20})
    assert 0 < ours[0].steps < STEPS
    assert ours[0].scales[0] < 2.0**20


class Looking(Callback):
    """A look-up of rank 0 alone after every step, also after one that was skipped."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_rank == 0:
            with torch.no_grad():
                module.losses.append(float(module.words(torch.arange(VOCABULARY)).sum()))


def test_look_ups_after_a_step_that_was_skipped(ranks: Callable[[int], Ranks]) -> None:
    """In validation, and on one rank: they must not wait for the optimizer."""
    how = {"validate": True, "val_check_interval": 1, "callbacks": [Looking()]}
    ours = compare(ranks, "16-mixed", halves(), 2, data=boosted, **how)
    assert [len(left.losses) for left in ours] == [STEPS * 4, STEPS * 3]


class Fused(Halves):
    """Adam's fused kernel looks for overflows itself, and steps all the same."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.counted(torch.optim.SGD(self.parameters(), lr=0.1, fused=True))


class Adversaries(Halves):
    """Two optimizers in manual optimization; the first one's step may be skipped while the second one's is not."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        tables, body = self.optimizers()
        for optimizer in (tables, body):
            tables.zero_grad()
            body.zero_grad()
            loss = self.loss(batch if optimizer is tables else {k: v for k, v in batch.items() if k != "boost"})
            self.manual_backward(loss)
            self.losses.append(float(loss.detach()))
            if self.global_rank == 0:  # the others answer before an overflow is agreed on
                self.losses.append(float(self.words((batch["ids"] + 1) % VOCABULARY).detach().sum()))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        tables = [self.words.weight, self.bags.weight]
        made = [torch.optim.SGD(tables, lr=0.1), torch.optim.SGD(self.body.parameters(), lr=0.1)]
        return [self.counted(optimizer) for optimizer in made]


SCALED: dict[str, tuple[Callable[[], Halves], dict[str, Any], int]] = {
    "clipping by norm": (halves(), {"gradient_clip_val": 0.05}, STEPS - 2),
    "clipping by value": (
        halves(),
        {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
        STEPS - 2,
    ),
    "accumulation": (halves(True, "adagrad"), {"accumulate_grad_batches": 3}, 1),
    "fused": (halves(cls=Fused), {}, STEPS),
    "two optimizers by hand": (halves(cls=Adversaries), {}, 2 * STEPS - 2),
}


@pytest.mark.parametrize("case", SCALED)
def test_overflows_beside(ranks: Callable[[int], Ranks], case: str) -> None:
    """What else happens to gradients between backward and the step."""
    make, arguments, steps = SCALED[case]
    ours = compare(ranks, "16-mixed", make, 2, data=boosted, **arguments)
    assert [left.steps for left in ours] == [steps, steps]
    scales = ours[0].scales
    assert scales == ours[1].scales and any(after < before for before, after in pairwise(scales))


def save(strategy: str, folder: str) -> Left:
    """Runs in a worker: a fit with a checkpoint in the middle, between two overflows."""
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    arguments: dict[str, Any] = {"callbacks": [callback], "enable_checkpointing": True}
    return fit(strategy, "16-mixed", halves(), 2, data=boosted, **arguments)


def test_checkpoints_hold_the_scale(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """As ddp writes it, and both ways; the scale of a fresh scaler is another one."""
    files = {who: str(tmp_path / who / "step=4.ckpt") for who in ("ddp", "embrace")}
    whole = {who: ranks(2).run(save, who, str(tmp_path / who)) for who in files}
    assert_near(whole["embrace"], whole["ddp"], "16-mixed")
    kept = [torch.load(path, weights_only=True)["MixedPrecision"] for path in files.values()]
    assert kept[0] == kept[1]
    assert kept[0]["scale"] == 128.0 and kept[0]["_growth_tracker"] == 1

    def resume(who: str, path: str) -> list[Left]:
        return ranks(2).run(fit, who, "16-mixed", halves(), 2, data=boosted, scaler={"init_scale": 2.0}, ckpt_path=path)

    expected = resume("ddp", files["ddp"])
    assert min(expected[0].scales) >= 32, "the scale is the file's, not the new scaler's"
    for who, path in (("embrace", files["ddp"]), ("embrace", files["embrace"]), ("ddp", files["embrace"])):
        assert_near(resume(who, path), expected, "16-mixed")


def test_a_failed_fit_leaves_the_users_scaler_alone() -> None:
    """A scaler that was given outlives the Trainer."""
    plugin = precise("16-mixed", None)["plugins"][0]
    before = set(vars(plugin.scaler))

    class Failing(Halves):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            assert "_unscale_grads_" in vars(plugin.scaler)
            raise ZeroDivisionError

    trainer = make_trainer(make_strategy("embrace"), 1, plugins=[plugin])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Failing(), DataLoader(quiet(0, 1), batch_size=None))
    assert set(vars(plugin.scaler)) == before
