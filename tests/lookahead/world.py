"""A strategy that does nothing but look ahead, and loaders of every kind, for tests in one process."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_embrace.lookahead.ahead import Lookahead, Pair
from lightning_embrace.lookahead.ends import agree_length
from lightning_embrace.lookahead.loader import length_of
from lightning_embrace.lookahead.reasons import LoaderKind
from tests.support.training import QUIET


class Looking(SingleDeviceStrategy):
    """Makes the calls that a strategy has to make."""

    def __init__(self, ahead: bool = True, wrapping: bool = True) -> None:
        super().__init__(device="cpu")
        self.asked: list[bool] = []
        self.warnings: list[str] = []
        self.pairs: list[Pair] = []
        self.stages: list[bool] = []
        self.kind = LoaderKind()
        self.ahead, self.wrapping = ahead, wrapping
        self.lookahead = Lookahead(self._ask, self.warnings.append)
        self.trainer: Any = None

    def _ask(self, exists: bool) -> list[bool]:
        self.asked.append(exists)
        return [exists]

    def barrier(self, name: str | None = None) -> None:
        self.kind.hear(name)

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self.lightning_module.trainer
        training = self.kind.is_training(trainer)
        self.stages.append(training)
        if not training or not self.wrapping:
            return dataloader
        length = agree_length([length_of(dataloader)]).length
        return self.lookahead.process(dataloader, length, trainer.limit_train_batches, self.ahead)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.pairs.append(self.lookahead.next_batch(self.lightning_module.trainer.train_dataloader))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.lookahead.hear([self.lookahead.word()])
        return super().training_step(*args, **kwargs)

    def teardown(self) -> None:
        self.lookahead.reset()
        super().teardown()


class Listening(LightningModule):
    """Notes what it is trained on, whether Lightning calls that the last batch, and the loaders' states."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.heard: list[Any] = []
        self.steps: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loop = self.trainer.fit_loop
        self.heard.append((batch_idx, plain(batch), loop.epoch_loop.batch_progress.is_last_batch))
        return self.layer(torch.ones(1)).sum()

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(self.trainer.global_step)
        loaders = self.trainer.fit_loop._combined_loader
        assert loaders is not None
        if states := loaders._state_dicts():
            self.heard.append(("state", deepcopy(states)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.heard.append(("validation", plain(batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def plain(batch: Any) -> Any:
    """The batch as numbers, which can be compared and do not change."""
    if isinstance(batch, Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return [plain(part) for part in batch] if isinstance(batch, (list, tuple)) else batch


class Stream(IterableDataset[Tensor]):
    """Samples without a length; every iteration has other ones."""

    def __init__(self, count: int) -> None:
        self.count, self.iterations = count, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.iterations += 1
        return (torch.tensor(100 * self.iterations + i) for i in range(self.count))


class Stateful:
    """A loader that saves its position; its state is the object that it goes on changing."""

    def __init__(self, count: int, sized: bool) -> None:
        self.count, self.state = count, {"position": 0, "finished": False}
        if sized:
            self.__class__ = type("SizedStateful", (Stateful,), {"__len__": lambda self: self.count})

    def __iter__(self) -> Iterator[Tensor]:
        if self.state["finished"]:
            self.state.update(position=0, finished=False)
        return self.batches()

    def batches(self) -> Iterator[Tensor]:
        while self.state["position"] < self.count:
            self.state["position"] += 1
            yield torch.tensor([self.state["position"]])
        self.state["finished"] = True

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def sized(count: int, start: int = 0, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(start, start + 2 * count).tolist(), batch_size=2, **arguments)


def fit(strategy: Looking, loader: Any, *callbacks: Callback, model: Any = None, **arguments: Any) -> Any:
    """Fits; returns the model and its Trainer."""
    model = Listening() if model is None else model
    ckpt_path = arguments.pop("ckpt_path", None)
    defaults = {"max_epochs": 2, "callbacks": list(callbacks), "accelerator": "cpu"}
    trainer = Trainer(strategy=strategy, **{**QUIET, **defaults, **arguments})
    trainer.fit(model, loader, sized(1, start=1000), ckpt_path=ckpt_path)
    return model, trainer
