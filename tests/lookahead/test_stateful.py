"""torchdata's StatefulDataLoader: what is saved is the trained position, and a fit that goes on is the same fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.lookahead.world import Looking, fit

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")


class Counting(IterableDataset[Tensor]):
    """A stream that saves its own position."""

    def __init__(self, count: int) -> None:
        self.count, self.position = count, 0

    def __iter__(self) -> Any:
        while self.position < self.count:
            self.position += 1
            yield self.position
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Saving(Callback):
    def __init__(self, path: Any, at: int) -> None:
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


MAKE = {
    "sized": lambda workers: stateful.StatefulDataLoader(list(range(10)), batch_size=2, num_workers=workers),
    "shuffled": lambda workers: stateful.StatefulDataLoader(
        list(range(10)), batch_size=2, shuffle=True, num_workers=workers
    ),
    "stream": lambda workers: stateful.StatefulDataLoader(Counting(10), batch_size=2, num_workers=workers),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "at"), [(kind, at) for kind in MAKE for at in (2, 5, 7) if kind != "stream" or at == 5]
)
def test_goes_on_where_it_was(tmp_path, kind, workers, at):
    """Saved states after every batch, and the batches after a restart, are those without look-ahead."""
    heard = {}
    for wrapping in (False, True):
        torch.manual_seed(3)
        path = tmp_path / f"{wrapping}.ckpt"
        before, _ = fit(Looking(wrapping=wrapping), MAKE[kind](workers), Saving(path, at), max_epochs=2)
        after, _ = fit(Looking(wrapping=wrapping), MAKE[kind](workers), ckpt_path=path, max_epochs=2)
        heard[wrapping] = before.heard, after.heard
    for was, now in zip(heard[False], heard[True]):
        assert trained(now) == trained(was)
    if kind != "stream":
        assert str(heard[True]) == str(heard[False])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("at", [2, 7])
def test_a_stream_loses_no_batch(tmp_path, workers, at):
    """Lightning's own checkpoint is behind the batch that it has fetched ahead, and that one is never trained on."""
    whole, _ = fit(Looking(), MAKE["stream"](workers), max_epochs=2)
    for wrapping in (False, True):
        path = tmp_path / f"{wrapping}.ckpt"
        fit(Looking(wrapping=wrapping), MAKE["stream"](workers), Saving(path, at), max_epochs=2)
        after, _ = fit(Looking(wrapping=wrapping), MAKE["stream"](workers), ckpt_path=path, max_epochs=2)
        batches = [batch for _, batch, _ in trained(after.heard)]
        assert batches == [batch for _, batch, _ in trained(whole.heard)][at + (not wrapping) :]


def trained(heard: list[Any]) -> list[Any]:
    return [entry for entry in heard if isinstance(entry[0], int)]
