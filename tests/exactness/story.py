"""Trainings in which much of a step is late or early, and a witness that it was."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import IterableDataset

from lightning_embrace import EmbRaceStrategy, optim
from lightning_embrace.schedule.dense import Block
from tests.exactness.models import Local
from tests.support.training import Outcome, outcome, train

#: many rows, of which a step looks few up: most of a gradient can wait
ROWS = 60
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: optim.Adam(p, lr=0.02),
    "adamw": lambda p: optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.05),
    "torch sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "torch adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "torch adam": lambda p: torch.optim.Adam(p, lr=0.02),
}
RATES: dict[str, Callable[..., Any]] = {
    "one cycle": lambda o, steps: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=steps),
    "steps": lambda o, _: lr_scheduler.StepLR(o, 1, 0.8),
    "lambda": lambda o, _: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1.0 + step)),
}
#: [step][rank] → that rank's batch
Steps = list[list[dict[str, Tensor]]]


class Story(Local):
    """Two tables, one of them a bag, three look-ups, and dense layers.

    Args:
        optimizer: A key of ``OPTIMIZERS``.
        rate: A key of ``RATES``, stepped after every step.
        sparse: For the tables.
        columns: For the tables.
    """

    def __init__(
        self, optimizer: str = "adam", rate: str | None = None, sparse: bool = True, columns: int = 10
    ) -> None:
        super().__init__(optimizer)
        self.rate = rate
        self.words = nn.Embedding(ROWS, columns, sparse=sparse, padding_idx=0)
        self.bags = nn.EmbeddingBag(ROWS, columns, sparse=sparse, mode="sum")
        self.body = nn.Sequential(nn.Linear(columns, 7), nn.Tanh(), nn.Linear(7, 3))

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        """[B, D]."""
        words = self.words(batch["ids"]).sum(1) + self.words(batch["more"]).sum(1)
        return torch.tanh(words + self.bags(batch["more"]))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(self.body(self.features(batch)).mean(1), batch["target"], reduction="sum")

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        if self.rate is None:
            return optimizer
        schedule = RATES[self.rate](optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Precise(Story):
    """Its tables differ in precision: their rows travel in messages of their own."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.coarse = nn.Embedding(ROWS, 4, sparse=True)

    def double(self) -> Any:
        super().double()
        self.coarse.float()
        return self

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return super().features(batch) + self.coarse(batch["ids"]).double().mean((1, 2)).unsqueeze(1)


# ---- data --------------------------------------------------------------------------------------------------------


def drawn(steps: int, world_size: int, seed: int = 3) -> Steps:
    """Ids at random: some rows come again in the next step, most do not."""
    return _steps(steps, world_size, seed, lambda t: range(ROWS))


def same(steps: int, world_size: int) -> Steps:
    """The same ids in every step: nothing can wait, and nothing come early."""
    first = _steps(1, world_size, 3, lambda t: range(ROWS))[0]
    others = _steps(steps, world_size, 4, lambda t: range(ROWS))
    return [[{**a, "target": b["target"]} for a, b in zip(first, step)] for step in others]


def disjoint(steps: int, world_size: int) -> Steps:
    """No id comes again in the next step: all of a gradient can wait, and all rows come early."""
    return _steps(steps, world_size, 5, lambda t: range(1 + t % 3 * 15, 1 + t % 3 * 15 + 15))


def with_empty(steps: int, world_size: int) -> Steps:
    """The last rank has no samples in every other step."""
    data = drawn(steps, world_size)
    for step in data[::2]:
        step[-1] = {key: value[:0] for key, value in step[-1].items()}
    return data


def _steps(steps: int, world_size: int, seed: int, rows: Callable[[int], range]) -> Steps:
    generator = torch.Generator().manual_seed(seed)

    def batch(step: int) -> dict[str, Tensor]:
        choice = torch.tensor(rows(step))
        ids, more = (choice[torch.randint(len(choice), (3, 2), generator=generator)] for _ in range(2))
        return {"ids": ids, "more": more, "target": torch.randn(3, generator=generator, dtype=torch.float64)}

    return [[batch(step) for _ in range(world_size)] for step in range(steps)]


class Unsized(IterableDataset):  # type: ignore[type-arg]
    """Batches without a length."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


# ---- runs --------------------------------------------------------------------------------------------------------


class Witness(Callback):
    """Sees after every step what was late, early and foreseen. It reads no parameter."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        session = getattr(trainer.strategy, "_session", None)
        if session is None:
            return
        foresight, pending = session.foresight, session.pending
        late = {id(entry): entry.late.counted for entry in pending._entries.values()}
        self.seen.append(
            {
                **(foresight.counts if foresight is not None else {}),
                "blocks": sum(not counted for counted in late.values()),
                "parts": sum(late.values()),
                "planned": list(foresight.planned) if foresight is not None else [],
                "foreseen": session.foreseen(),
                "relaxed": session.relaxed,
            }
        )

    def most(self) -> dict[str, int]:
        """The largest value of every count."""
        names = ("prior", "delayed", "early", "in vain", "rest", "blocks", "parts")
        return {name: max((seen.get(name, 0) for seen in self.seen), default=0) for name in names}


class Seen(NamedTuple):
    """What a run leaves behind, and what the witness and the callbacks saw."""

    outcome: Outcome
    steps: list[dict[str, Any]]
    most: dict[str, int]
    results: list[Any]


Callbacks = Callable[[], list[Callback]]


@contextlib.contextmanager
def slow_wire() -> Iterator[None]:
    """Whatever may wait does: for the strategy, no AllReduce is done when the optimizer steps."""
    with mock.patch.object(Block, "is_done", return_value=False):
        yield


def no_callbacks() -> list[Callback]:
    """None."""
    return []


def on_rank(
    make: Callable[[], Any],
    data: Steps,
    strategy: dict[str, Any],
    callbacks: Callbacks = no_callbacks,
    unsized: bool = False,
    lengths: tuple[int, ...] | None = None,
    **arguments: Any,
) -> Seen:
    """Runs in a worker: trains on this rank's batches, with all that may be late being late."""
    rank, world_size = int(os.environ["LOCAL_RANK"]), len(data[0])
    mine: Any = [step[rank] for step in data][: lengths[rank] if lengths is not None else None]
    witness, others = Witness(), callbacks()
    with slow_wire():
        model, trainer = train(
            make,
            Unsized(mine) if unsized else mine,
            EmbRaceStrategy(**{"tables": ["*"], **strategy}),
            world_size,
            callbacks=[witness, *others],
            **arguments,
        )
    return Seen(outcome(model, trainer), witness.seen, witness.most(), _results(others))


def in_one_process(
    make: Callable[[], Any], data: Steps, callbacks: Callbacks = no_callbacks, unsized: bool = False, **arguments: Any
) -> Seen:
    """One process that plays all ranks."""
    others, all_ranks = callbacks(), [list(step) for step in data]
    batches: Any = Unsized(all_ranks) if unsized else all_ranks
    model, trainer = train(make, batches, "auto", callbacks=others, **arguments)
    return Seen(outcome(model, trainer), [], {}, _results(others))


def _results(callbacks: list[Callback]) -> list[Any]:
    return [getattr(callback, "results", None) for callback in callbacks]


def story(*arguments: Any, cls: type[Story] = Story, **named: Any) -> Callable[[], Story]:
    """Builds the model; can be pickled."""
    return functools.partial(cls, *arguments, **named)
