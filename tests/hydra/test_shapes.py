"""When a batch may take more than those that were measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.nn import functional as F

from lightning_embrace import HydraStrategy
from lightning_embrace.hydra.shapes import Growth, Shapes
from tests.hydra import zoo
from tests.hydra.runs import assert_same, fit


def test_longer_sequences_of_as_many_bytes() -> None:
    """One side has grown; together they have not."""
    shapes = Shapes()
    assert shapes.add((torch.zeros(8, 16), 0)) is not None
    assert shapes.add((torch.zeros(4, 32), 1)) == Growth(nbytes=1.0, side=2.0)
    assert shapes.add((torch.zeros(4, 32), 2)) is None and shapes.add((torch.zeros(3, 20), 3)) is None


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.zeros(8, 32)},  # no side has grown, and the tensor has
        {"x": torch.zeros(4, 32), "y": torch.zeros(1)},  # something is new
        {"x": torch.zeros(4, 8, 4)},  # sides cannot be compared
        {"x": torch.zeros(4, 32, dtype=torch.float64)},  # bytes alone
    ],
)
def test_larger_in_some_way(batch: Any) -> None:
    shapes = Shapes()
    for sides in ((8, 16), (4, 32)):
        shapes.add({"x": torch.zeros(*sides)})
    assert shapes.add(batch) is not None
    assert shapes.add(batch) is None


def test_a_tensor_that_grows_while_another_shrinks() -> None:
    """Sides and bytes of all are as before."""
    shapes = Shapes()
    for x, y in (((8, 16), 512), ((4, 32), 512)):
        shapes.add((torch.zeros(*x), torch.zeros(y)))
    assert shapes.add((torch.zeros(6, 30), torch.zeros(10))) is not None


class Attending(zoo.Base):
    """Its blocks keep what grows with the square of a sequence's length."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = torch.nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.softmax(x @ x.transpose(1, 2), dim=-1).tanh() @ self.mix(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(self.Block() for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        self.losses.append(loss := batch.pow(2).mean())
        return loss


class Notes(Callback):
    """What computing is planned to take, and whether it is measured, in each step."""

    def __init__(self) -> None:
        self.working: list[int] = []
        self.measured: list[bool] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.working.append(trainer.strategy.planned.budget.working)
        self.measured.append(trainer.strategy._session.pilot is not None)


def test_longer_sequences_are_measured_anew() -> None:
    """Of as many tokens; what is planned from then on is what a run that has met nothing else plans for them."""
    numbers = torch.Generator().manual_seed(0)
    short, long = (torch.randn(*sides, 8, generator=numbers) for sides in ((16, 4), (1, 64)))
    notes, alone = Notes(), Notes()
    data = [short, short, short, long, long, short]
    ours = fit(Attending, HydraStrategy(device_memory="1MiB"), data, callbacks=[notes])
    assert_same(ours, fit(Attending, "auto", data))
    assert notes.measured == [True, False, False, True, False, False]
    fit(Attending, HydraStrategy(device_memory="1MiB"), [long, long], callbacks=[alone])
    assert notes.working[4] == notes.working[5] == alone.working[1] > 2 * notes.working[2]
    assert notes.working[3] >= notes.working[4]
