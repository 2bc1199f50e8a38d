"""A training run in which one rank comes to harm at a chosen point. Also a script, as a user would start it."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn

from lightning_embrace import EmbRaceStrategy
from lightning_embrace.comm.base import Done
from lightning_embrace.comm.control import Control
from lightning_embrace.comm.horovod_backend import HorovodCommunicator

ROWS = 40
#: where a rank can come to harm; "exchange=NAME" is the moment it enters the first exchange whose name holds NAME
POINTS = (
    "before_trainer",
    "start_of_horovod",
    "setup",
    "configure_model",
    "configure_optimizers",
    "before_lookup",
    "between_lookups",
    "after_lookup",
    "backward",
    "before_optimizer",
    "after_optimizer",
    "batch_end",
    "loader",
    "validation",
    "train_end",
    # of a run that goes on, see `goes_on`
    "load",
    "train",
    "save",
    "write",
    "rename",
)


class Harm:
    """What happens to which rank, where and when.

    Args:
        point: One of :data:`POINTS`, or ``"exchange=NAME"``.
        kind: ``"kill"``, ``"raise"``, ``"stay"`` (raises, but its process goes on), ``"stop"``, ``"bad_id"``,
            ``"sleep"`` or ``"skip"`` (leaves out the exchange, or the rest of the training step, and goes on).
        rank: The rank.
        step: Its training step, counted from 0.
        seconds: How long ``"sleep"`` takes; how long after Horovod's start has begun it comes to harm in it.
    """

    def __init__(self, point: str, kind: str, rank: int, step: int = 2, seconds: float = 5.0) -> None:
        assert point in POINTS or point.startswith("exchange="), point
        self.point, self.kind, self.rank, self.step, self.seconds = point, kind, rank, step, seconds
        self.done = False

    def at(self, point: str, step: int) -> bool:
        """Comes to harm when this is the rank, the point and the step; says whether the caller is to do it."""
        mine = int(os.environ.get("LOCAL_RANK", "0")) == self.rank
        if self.done or not mine or point != self.point or step < self.step:
            return False
        self.done = True
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.kind == "sleep":
            time.sleep(self.seconds)
        if self.kind in ("raise", "stay"):
            raise ValueError(f"harm at {point}")
        return self.kind in ("bad_id", "skip")


class Late(LightningModule):
    """Two tables, two look-ups a step, a head; validates after every third step. Its updates may be late."""

    def __init__(self, harm: Harm) -> None:
        super().__init__()
        self.harm = harm
        self.words = nn.Embedding(ROWS, 6)
        self.tags = nn.Embedding(ROWS, 4)
        self.head = nn.Linear(10, 1)

    def setup(self, stage: str) -> None:
        self.harm.at("setup", self.harm.step)

    def configure_model(self) -> None:
        self.harm.at("configure_model", self.harm.step)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        self.harm.at("between_lookups", self.global_step)
        return self.head(torch.cat([words, self.tags(ids)], dim=-1)).mean()

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        if self.harm.at("before_lookup", self.global_step):
            ids = ids.clone()
            ids[-1] = ROWS + 7
        loss = self(ids)
        self.harm.at("after_lookup", self.global_step)
        if loss.requires_grad:
            loss.register_hook(lambda _: self._in_backward())
        return loss

    def _in_backward(self) -> None:
        self.harm.at("backward", self.global_step)

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        if self.harm.at("validation", self.global_step):
            ids = ids.clone()
            ids[-1] = -3
        self.log("validation_loss", self(ids), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        print("training", flush=True)


class Victim(Late):
    """Logs with an all-reduce, and has hooks that could read gradients: its updates are never late."""

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(ids, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.harm.at("configure_optimizers", self.harm.step)
        optimizer = torch.optim.Adam(self.parameters())
        optimizer.register_step_post_hook(lambda *_: self._after_optimizer())
        return optimizer

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.harm.at("before_optimizer", self.global_step)

    def _after_optimizer(self) -> None:
        self.harm.at("after_optimizer", self.global_step)


class Skipping(Late):
    """In manual optimization, where nothing keeps a rank from leaving a step out."""

    def __init__(self, harm: Harm) -> None:
        super().__init__(harm)
        self.automatic_optimization = False

    def training_step(self, ids: Tensor, batch_idx: int) -> None:
        loss = self(ids)
        if self.harm.at("after_lookup", self.global_step):
            return
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class _Callback(Callback):
    def __init__(self, harm: Harm, alone: bool) -> None:
        self.harm, self.alone = harm, alone

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        # a look-up that no other rank makes; it may have to wait for their optimizers
        if trainer.is_global_zero and self.alone:
            with torch.no_grad():
                module.words(torch.arange(3))
        self.harm.at("batch_end", trainer.global_step)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self.harm.at("train_end", trainer.global_step)


class Loader:
    """Batches of ids; raises in the middle when told to."""

    def __init__(self, harm: Harm, batches: int) -> None:
        self.harm, self.batches = harm, batches

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(int(os.environ.get("LOCAL_RANK", "0")))
        for step in range(self.batches):
            self.harm.at("loader", step)
            yield torch.randint(ROWS, (5,), generator=generator)

    def __len__(self) -> int:
        return self.batches


def _harm_in_exchange(harm: Harm) -> None:
    """Lets a rank come to harm as it enters an exchange."""
    name = harm.point.removeprefix("exchange=")
    enter: Callable[..., None] = Control.at

    def at(self: Control, exchange: str) -> None:
        enter(self, exchange)
        if name in exchange:
            harm.at(harm.point, harm.step if self.step is None else self.step)

    Control.at = at  # type: ignore[method-assign]


def _skip_exchange_of_horovod(harm: Harm) -> None:
    """Lets a rank leave out an exchange that needs no answer, and go on with what it has itself."""
    name = harm.point.removeprefix("exchange=")
    issue: Callable[..., Any] = HorovodCommunicator._issue

    def issue_or_skip(
        self: HorovodCommunicator, what: str, operation: Any, finish: Any, low_priority: bool = False
    ) -> Any:
        if name in what and self.control.step is not None and harm.at(harm.point, self.control.step):
            return Done(finish(None))
        return issue(self, what, operation, finish, low_priority)

    HorovodCommunicator._issue = issue_or_skip  # type: ignore[method-assign]


def _harm_in_start_of_horovod(harm: Harm) -> None:
    """Lets a rank come to harm in a thread, while others of its threads and the other ranks are connecting Horovod."""
    import horovod.torch as horovod

    start = horovod.init

    def init() -> None:
        if harm.seconds == 0.0:
            harm.at(harm.point, harm.step)
        threading.Timer(harm.seconds, harm.at, (harm.point, harm.step)).start()
        start()

    horovod.init = init


def _prepare(harm: Harm) -> type[Late] | None:
    """Places harm that is done outside of the model; returns the model that it needs, if it needs one."""
    if harm.point == "start_of_horovod":
        _harm_in_start_of_horovod(harm)
    if harm.point.startswith("exchange="):
        (_skip_exchange_of_horovod if harm.kind == "skip" else _harm_in_exchange)(harm)
    elif harm.kind == "skip":
        return Skipping
    return None


def fit(
    harm: Harm,
    devices: int,
    start_method: str = "popen",
    timeout: float = 600.0,
    steps: int = 7,
    save: str | None = None,
    late: bool = False,
    alone: bool = True,
    trace: str | None = None,
    communication: str = "torch",
) -> None:
    """Trains; ends with an exception on every rank unless all goes well."""
    harm.at("before_trainer", harm.step)
    model = (_prepare(harm) or (Late if late else Victim))(harm)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=EmbRaceStrategy(
            tables=["*"],
            lookahead=(lambda ids: {"words": ids, "tags": ids}) if late else "auto",
            trace=trace,
            communication=communication,
            timeout=timedelta(seconds=timeout),
            start_method=start_method,
        ),
        max_steps=steps,
        callbacks=[_Callback(harm, alone), *([OnExceptionCheckpoint(save)] if save else [])],
        logger=False,
        enable_checkpointing=save is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        val_check_interval=3,
        log_every_n_steps=1,
    )
    try:
        trainer.fit(model, Loader(harm, steps), Loader(Harm("loader", "none", -1), 4))
    except ValueError:
        if harm.kind == "stay":  # a script that catches the error, and has more to do
            time.sleep(3600)
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--point", default="setup")
    parser.add_argument("--kind", default="none")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--step", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--start-method", default="popen")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--save")
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--trace")
    parser.add_argument("--communication", default="torch")
    arguments = vars(parser.parse_args())
    harm = Harm(*(arguments.pop(name) for name in ("point", "kind", "rank", "step", "seconds")))
    fit(harm, **arguments)
    print("fit returned", flush=True)


if __name__ == "__main__":
    main()
