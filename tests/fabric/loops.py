"""Loops of Fabric as users write them, and what they leave behind under any strategy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning.fabric
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_embrace.fabric import EmbRaceStrategy
from tests.exactness import story as s
from tests.support.lifecycle import plain as comparable

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    # rows without gradient keep their weights: those of the next batch may come early
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


class Net(nn.Module):
    """Two tables, one of them a bag, three look-ups, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(s.ROWS, 10, padding_idx=0)
        self.bags = nn.EmbeddingBag(s.ROWS, 10, mode="sum")
        self.body = nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, ids: Tensor, more: Tensor) -> Tensor:
        words = self.words(ids).sum(1) + self.words(more).sum(1)
        return self.body(torch.tanh(words + self.bags(more))).mean(1)


class Rows(Net):
    """No vectors of bags travel, which a known batch does without: rows are the same however they are fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(s.ROWS, 10, mode="max")


class Buffered(Net):
    """Batch norm, and a moving average that every forward pass reads and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.body = nn.Sequential(self.norm, self.body)
        self.register_buffer("average", torch.zeros(()))

    def forward(self, ids: Tensor, more: Tensor) -> Tensor:
        out = super().forward(ids, more) + self.average
        self.average.mul_(0.9).add_(out.detach().mean() * 0.1)
        return out


class Tools(NamedTuple):
    """What a loop works with, and where it notes numbers to compare."""

    fabric: Any
    model: Any
    optimizer: Any
    loader: Any
    seen: list[Any]

    def loss(self, batch: dict[str, Tensor], power: int = 2) -> Tensor:
        """Of one forward pass."""
        value = (self.model(batch["ids"], batch["more"]) - batch["target"]).abs().pow(power).sum()
        self.seen.append(float(value.detach()))
        return value


Loop = Callable[[Tools], None]

# ---- loops -------------------------------------------------------------------------------------------------------


def plain(t: Tools) -> None:
    """As in Fabric's documentation, over two epochs."""
    for _ in range(2):
        for batch in t.loader:
            t.optimizer.zero_grad()
            t.fabric.backward(t.loss(batch))
            t.optimizer.step()


def accumulating(t: Tools) -> None:
    """Three batches a step, the last step of fewer; a look at the weights in between."""
    count = len(t.loader)
    for number, batch in enumerate(t.loader, 1):
        last = number % 3 == 0 or number == count
        with t.fabric.no_backward_sync(t.model, enabled=not last):
            t.fabric.backward(t.loss(batch) / 3)
        if last:
            t.optimizer.step()
            t.optimizer.zero_grad()


def two_forwards(t: Tools) -> None:
    """Two forward passes, their backward pass, and a value that all ranks reduce in between."""
    for batch in t.loader:
        other = {**batch, "ids": (batch["ids"] + 7) % s.ROWS}
        loss = t.loss(batch) * 0.5 + t.loss(other, power=3)
        t.seen.append(float(t.fabric.all_reduce(loss.detach().clone())))
        t.optimizer.zero_grad()
        t.fabric.backward(loss)
        t.optimizer.step()


def two_rounds(t: Tools) -> None:
    """Forward and backward twice, both synchronised, before the optimizer steps."""
    for batch in t.loader:
        other = {**batch, "ids": (batch["ids"] + 7) % s.ROWS}
        t.optimizer.zero_grad()
        t.fabric.backward(t.loss(batch))
        t.fabric.backward(t.loss(other, power=3))
        t.optimizer.step()


def two_backwards(t: Tools) -> None:
    """Two backward passes through one forward pass."""
    for batch in t.loader:
        t.optimizer.zero_grad()
        out = t.model(batch["ids"], batch["more"])
        t.seen.append(float(out.detach().sum()))
        t.fabric.backward((out - batch["target"]).pow(2).sum(), retain_graph=True)
        t.fabric.backward(out.abs().sum() * 0.1)
        t.optimizer.step()


def one_backward(t: Tools) -> None:
    """The same in one: ddp leaves each rank its own gradients in the second of two."""
    for batch in t.loader:
        t.optimizer.zero_grad()
        out = t.model(batch["ids"], batch["more"])
        t.seen.append(float(out.detach().sum()))
        t.fabric.backward((out - batch["target"]).pow(2).sum() + out.abs().sum() * 0.1)
        t.optimizer.step()


def clipped(t: Tools) -> None:
    """By norm, by another norm, and by value, in turn."""
    ways: list[dict[str, Any]] = [{"max_norm": 0.5}, {"max_norm": 0.3, "norm_type": "inf"}, {"clip_val": 0.02}]
    for number, batch in enumerate(t.loader):
        t.optimizer.zero_grad()
        t.fabric.backward(t.loss(batch))
        norm = t.fabric.clip_gradients(t.model, t.optimizer, **ways[number % 3])
        t.seen.append(None if norm is None else (float(norm), str(norm.dtype)))
        t.optimizer.step()


def collectives(t: Tools) -> None:
    """All of Fabric's, in a step and between steps; after look-ups of which the ranks have made unequal numbers."""
    for number, batch in enumerate(t.loader):
        loss = t.loss(batch)
        if t.fabric.global_rank == number % 2:
            loss = loss + t.model.module.words((batch["ids"] + 5) % s.ROWS).sum() * 0.1
        loss = loss + t.fabric.all_gather(loss.detach()).sum() * 0
        t.seen.append(t.fabric.all_gather(loss.detach()).flatten().tolist())
        t.fabric.barrier()
        t.optimizer.zero_grad()
        t.fabric.backward(loss)
        t.seen.append(t.fabric.broadcast({"loss": float(loss.detach())}, src=1)["loss"])
        t.optimizer.step()
        t.seen.append(float(t.fabric.all_reduce(loss.detach(), reduce_op="sum")))


def closures(t: Tools) -> None:
    """The optimizer runs the step."""
    for batch in t.loader:

        def closure(batch: dict[str, Tensor] = batch) -> Tensor:
            t.optimizer.zero_grad()
            loss = t.loss(batch)
            t.fabric.backward(loss)
            return loss

        t.seen.append(float(t.optimizer.step(closure).detach()))


def evaluating(t: Tools) -> None:
    """Every third step, a forward pass of every rank without gradients, and of the reference for the buffers' sake."""
    for number, batch in enumerate(t.loader):
        t.optimizer.zero_grad()
        t.fabric.backward(t.loss(batch))
        t.optimizer.step()
        if number % 3 == 2:
            t.model.eval()
            with torch.no_grad():
                t.loss(batch)
                t.loss(batch)
            t.model.train()


def evaluating_in_a_step(t: Tools) -> None:
    """Between a forward pass and its backward pass."""
    for batch in t.loader:
        loss = t.loss(batch)
        with torch.no_grad():
            t.loss({**batch, "ids": (batch["ids"] + 3) % s.ROWS})
        t.optimizer.zero_grad()
        t.fabric.backward(loss)
        t.optimizer.step()


def zeroing_otherwise(t: Tools) -> None:
    """Gradients that are zeros instead of none, of the model or of the optimizer, after the step or before backward."""
    for number, batch in enumerate(t.loader):
        loss = t.loss(batch)
        if number % 2:
            t.model.zero_grad(set_to_none=number % 4 == 1)
        else:
            t.optimizer.zero_grad(set_to_none=number % 4 == 0)
        t.fabric.backward(loss)
        t.optimizer.step()


def never_zeroing(t: Tools) -> None:
    """Gradients of all steps add up: rows of earlier batches move, too."""
    for batch in t.loader:
        t.fabric.backward(t.loss(batch) * 0.1)
        t.optimizer.step()


def noisy(t: Tools) -> None:
    """Adds to the gradients of all rows, past autograd, in every second step."""
    for number, batch in enumerate(t.loader):
        t.optimizer.zero_grad()
        t.fabric.backward(t.loss(batch))
        if number % 2:
            for parameter in t.optimizer.param_groups[0]["params"]:
                parameter.grad.data.add_(0.01)
        t.optimizer.step()


def changing_weights(t: Tools) -> None:
    """Moves all weights between steps, as clamping or averaging does."""
    for batch in t.loader:
        t.optimizer.zero_grad()
        t.fabric.backward(t.loss(batch))
        t.optimizer.step()
        with torch.no_grad():
            for parameter in t.model.parameters():
                parameter.mul_(0.99)


def skipping(t: Tools) -> None:
    """Some batches are not trained on, and some steps are not taken."""
    for number, batch in enumerate(t.loader):
        if number % 4 == 1:
            continue
        t.optimizer.zero_grad()
        t.fabric.backward(t.loss(batch))
        if number % 4 != 3:
            t.optimizer.step()


def by_a_schedule(t: Tools) -> None:
    """A learning rate that changes after every step."""
    schedule = torch.optim.lr_scheduler.StepLR(t.optimizer, 1, 0.8)
    for batch in t.loader:
        t.optimizer.zero_grad()
        t.fabric.backward(t.loss(batch))
        t.optimizer.step()
        schedule.step()


LOOPS: dict[str, Loop] = {
    f.__name__: f
    for f in (
        plain,
        accumulating,
        two_forwards,
        two_rounds,
        two_backwards,
        one_backward,
        clipped,
        collectives,
        closures,
        evaluating,
        evaluating_in_a_step,
        zeroing_otherwise,
        never_zeroing,
        noisy,
        changing_weights,
        skipping,
        by_a_schedule,
    )
}

_OF_DDP = {"two_backwards": "one_backward"}

# ---- runs --------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What a loop leaves behind on a rank."""

    state: dict[str, Tensor]
    optimizer: Any
    seen: list[Any]
    sent: dict[str, int]
    #: what the steps' rows were, in sum: early, planned
    rows: dict[str, int]


def make_strategy(name: str, **arguments: Any) -> Any:
    """``"embrace"`` shards every table, whatever its size."""
    return EmbRaceStrategy(**{"tables": ["*"], **arguments}) if name == "embrace" else name


def this_rank() -> int:
    """The rank of the worker that runs this."""
    return int(os.environ["LOCAL_RANK"])


def launched(strategy: Any, world_size: int, **arguments: Any) -> Any:
    """A Fabric on the workers of a pool."""
    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=world_size, strategy=strategy, **arguments)
    fabric.launch()
    return fabric


def make(cls: Callable[[], nn.Module] = Net) -> nn.Module:
    """The same weights in every run."""
    torch.manual_seed(1)
    return cls().double()


def loader(data: s.Steps) -> DataLoader[Any]:
    """This rank's ready batches."""
    return DataLoader([step[this_rank()] for step in data], batch_size=None, shuffle=False)  # type: ignore[arg-type]


def run(
    loop: str,
    strategy: Any,
    data: s.Steps,
    optimizer: str = "adam",
    cls: Callable[[], nn.Module] = Net,
    apart: bool = False,
) -> Result:
    """Runs in a worker."""
    fabric = launched(strategy, len(data[0]))
    batches = fabric.setup_dataloaders(loader(data), use_distributed_sampler=False)
    # every rank begins with its own weights: those of rank 0 count
    module = make(cls)
    if this_rank() > 0:
        for parameter in module.parameters():
            parameter.data.add_(1.0)
    if apart:
        model = fabric.setup_module(module)
        made = fabric.setup_optimizers(OPTIMIZERS[optimizer](model.parameters()))
    else:
        model, made = fabric.setup(module, OPTIMIZERS[optimizer](module.parameters()))
    seen: list[Any] = []
    with watching(fabric.strategy) as rows:
        LOOPS[loop](Tools(fabric, model, made, batches, seen))
    sent = dict(fabric.strategy.traffic.sent) if hasattr(fabric.strategy, "traffic") else {}
    if hasattr(fabric.strategy, "full_state_dict"):
        fabric.strategy.teardown()
    return Result(comparable(dict(module.state_dict())), comparable(made.optimizer.state_dict()), seen, sent, rows)


@contextlib.contextmanager
def watching(strategy: Any) -> Iterator[dict[str, int]]:
    """Counts what the look-ahead did."""
    rows = {"early": 0, "planned": 0}
    foresight = getattr(getattr(strategy, "_session", None), "foresight", None)
    if foresight is None:
        yield rows
        return
    begin = foresight.begin

    def counted(*arguments: Any) -> None:
        early = foresight._early
        begin(*arguments)
        if early is not None and not foresight._ahead.moved:  # else they are fetched anew
            rows["early"] += sum(ids.numel() for ids in early.wants[foresight._comm.rank].values())
        rows["planned"] += len(foresight.planned)

    foresight.begin = counted
    yield rows
    del foresight.begin


def both(loop: str, data: s.Steps, settings: dict[str, Any], **arguments: Any) -> tuple[Result, Result]:
    """Runs in a worker: under ``embrace``, then under ``ddp``."""
    ours = run(loop, make_strategy("embrace", **settings), data, **arguments)
    return ours, run(_OF_DDP.get(loop, loop), "ddp", data, **arguments)


def ids(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model looks up."""
    return {"words": torch.cat([batch["ids"], batch["more"]]), "bags": batch["more"]}
