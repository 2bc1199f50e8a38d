"""What a task's Trainer does for its fleet: it takes turns on the device, and keeps a checkpoint to go on from."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_embrace.fleet.layout import CHECKPOINT
from lightning_embrace.fleet.pace import Pace, Progress
from lightning_embrace.fleet.protocol import Order, Pause
from lightning_embrace.fleet.replay import Replay
from lightning_embrace.fleet.turns import TaskPaused, TaskStopped, Turns
from lightning_embrace.namespaces import Namespace


class Standing:
    """How far a fit is, as told after its last batch.

    Args:
        pace: What is measured.
        pause: Up to where it goes.
    """

    def __init__(self, pace: Pace, pause: Pause | None) -> None:
        self._pace = pace
        self._pause = pause
        self._step = 0
        self._loss: Tensor | None = None
        self._left = math.inf

    def note(self, trainer: Any, outputs: Any) -> None:
        """A training batch is over.

        Args:
            trainer: Whose.
            outputs: What the step has returned.
        """
        self._pace.batch_over()
        self._step = int(trainer.global_step)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._loss = loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None
        self._left = min(batches_left(trainer), batches_to(self._pause, trainer))

    def progress(self) -> Progress:
        """What the fleet is told."""
        pace, loss = self._pace, self._loss
        with torch.inference_mode(False):
            return Progress(
                self._step,
                None if loss is None else float(loss),
                pace.remaining(self._left),
                pace.unit,
                pace.longest,
            )


def batches_left(trainer: Any) -> float:
    """Training batches that are still to come; ``inf``: not known.

    Args:
        trainer: In a fit.
    """
    left = math.inf
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        left = trainer.max_epochs * trainer.num_training_batches - done
    if trainer.max_steps >= 0:
        left = min(left, (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
    return max(0.0, left)


def batches_to(pause: Pause | None, trainer: Any) -> float:
    """Training batches until then; ``inf``: not known, or there is none.

    Args:
        pause: Of the task.
        trainer: In a fit.
    """
    if pause is None:
        return math.inf
    if pause.unit == "steps":
        left: float = (pause.at - trainer.global_step) * trainer.accumulate_grad_batches
    else:
        left = pause.at * trainer.num_training_batches - trainer.fit_loop.epoch_loop.total_batch_idx - 1
    return max(0.0, left)


def metrics_of(trainer: Any) -> dict[str, float]:
    """What was logged last."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class _TakesTurns:
    """The first of all callbacks: whatever the others compute before a batch has the device already."""

    def __init__(self, turns: Turns, standing: Standing) -> None:
        self._turns = turns
        self._standing = standing

    def on_train_batch_start(self, *_: Any) -> None:
        self._turns.begin()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self._turns.pause()
        self._standing.note(trainer, outputs)
        self._turns.end()

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        self._turns.begin()

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self._turns.end()

    def on_validation_end(self, *_: Any) -> None:
        self._turns.end()

    def on_train_epoch_end(self, *_: Any) -> None:
        self._turns.end()  # no batch has ended where one was skipped


class _KeepsCheckpoint:
    """The last of all callbacks: what the others have counted is in the checkpoint.

    Checkpoints are written where Lightning goes on exactly: after a batch that an optimizer step and neither
    validation nor the end of an epoch follow, after validation, and after an epoch.
    """

    def __init__(self, order: Order, turns: Turns, replay: Replay) -> None:
        self.path = order.folder / CHECKPOINT
        self.dirpath = order.folder
        self._every = order.checkpoint_every
        self._pause = order.pause
        self._turns = turns
        self._replay = replay
        self._trainer: Any = None
        self._last_step = 0
        # nothing has been trained since it was written
        self._is_new = False

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return self._replay.state(self._trainer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._replay.load(state_dict)

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self._last_step = int(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._is_new = False
        loop = trainer.fit_loop
        if loop._should_accumulate() or loop.epoch_loop._is_training_done:
            return
        if not loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            self._at_safe_point(trainer)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking and not trainer.fit_loop._should_accumulate():
            self._at_safe_point(trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        saved = self._every is None and not trainer.should_stop
        if saved:
            self._save(trainer)
        if not trainer.fit_loop.done:
            self._at_safe_point(trainer, trainer.current_epoch + 1, saved)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        if not self._is_new:
            self._save(trainer)

    def _at_safe_point(self, trainer: Any, epochs: int = 0, saved: bool = False) -> None:
        """Saves if need be.

        Args:
            trainer: In a fit.
            epochs: At an epoch's end: how many are over.
            saved: It has been saved here.
        """
        if trainer.should_stop:
            return  # it ends by itself, and no checkpoint says so
        pauses, stopping = self._pauses(trainer, epochs), self._turns.stopping
        is_due = self._every is not None and trainer.global_step >= self._last_step + self._every
        if (pauses or stopping or is_due) and not saved:
            self._save(trainer)
        if pauses:
            raise TaskPaused(self._score(trainer), metrics_of(trainer))
        if stopping:
            raise TaskStopped

    def _pauses(self, trainer: Any, epochs: int) -> bool:
        pause = self._pause
        if pause is None or batches_left(trainer) == 0:
            return False
        return (trainer.global_step if pause.unit == "steps" else epochs) >= pause.at

    def _score(self, trainer: Any) -> float:
        assert self._pause is not None
        metrics, monitor = metrics_of(trainer), self._pause.monitor
        if monitor not in metrics:
            raise ValueError(
                f"SuccessiveHalving(monitor={monitor!r}): the task has not logged it. Until {self._pause.unit[:-1]}"
                f" {self._pause.at} it has logged {', '.join(map(repr, metrics)) or 'nothing'}."
            )
        return metrics[monitor]

    def _save(self, trainer: Any) -> None:
        self._last_step = int(trainer.global_step)
        trainer.save_checkpoint(self.path)
        self._is_new = True


def takes_turns(namespace: Namespace, turns: Turns, standing: Standing) -> Any:
    """A callback that has a device for each batch.

    Args:
        namespace: Of Lightning.
        turns: The task's.
        standing: Is told of each training batch.
    """
    return type("TakesTurns", (_TakesTurns, namespace.get("callbacks.Callback")), {})(turns, standing)


def keeps_checkpoint(namespace: Namespace, order: Order, turns: Turns, replay: Replay) -> Any:
    """A callback that saves, and that ends a fit whose fleet ends or that is to pause.

    Args:
        namespace: Of Lightning.
        order: Says where and how often, and where to pause.
        turns: The task's.
        replay: Says how far the training loaders are.
    """
    base = namespace.get("callbacks.Checkpoint")
    return type("KeepsCheckpoint", (_KeepsCheckpoint, base), {})(order, turns, replay)
