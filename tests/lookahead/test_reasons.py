"""What can be learned from Lightning: which loaders train, and where the next batch cannot be known."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from lightning_embrace.lookahead.reasons import LoaderKind, fetches_itself, reason_off
from tests.lookahead.world import Listening, Looking, fit, sized
from tests.support.training import QUIET


class Estimating(Callback):
    """Sets the training loaders up while the stage is another."""

    def on_sanity_check_start(self, trainer: Any, *_: Any) -> None:
        assert trainer.estimated_stepping_batches


class Planning(Listening):
    """Asks for the number of steps, as schedules do, before anything is set up."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 6
        return super().configure_optimizers()


@pytest.mark.parametrize(
    ("model", "callbacks", "arguments", "stages"),
    [
        (Listening, [], {}, [True, False]),
        (Listening, [], {"num_sanity_val_steps": 1}, [False, True]),
        (Listening, [Estimating()], {"num_sanity_val_steps": 1}, [True, False]),
        (Planning, [], {}, [True, False]),
        (Listening, [], {"limit_val_batches": 0}, [True]),
    ],
)
def test_training_loaders_are_told_from_others(model, callbacks, arguments, stages):
    strategy = Looking()
    fit(strategy, sized(3), *callbacks, model=model(), **arguments)
    assert strategy.stages == stages


def test_no_loader_trains_outside_a_fit():
    strategy = Looking()
    trainer = Trainer(strategy=strategy, accelerator="cpu", **QUIET)
    model = Listening()
    trainer.validate(model, sized(1), verbose=False)
    trainer.fit(model, sized(2))
    trainer.validate(model, sized(1), verbose=False)
    assert strategy.stages == [False, True, False]


class Hooked(Listening):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Iterating(Listening):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


class HookedData(LightningDataModule):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


class State:
    """What a Trainer would have."""

    def __init__(self, module: LightningModule, datamodule: Any = None) -> None:
        self.lightning_module, self.datamodule = module, datamodule


def test_says_why_the_next_batch_is_not_known():
    assert reason_off(State(Listening()), learns=True) is None
    assert reason_off(State(Listening(), LightningDataModule()), learns=True) is None
    assert "Hooked.on_after_batch_transfer" in reason_off(State(Hooked()), learns=True)
    assert reason_off(State(Hooked()), learns=False) is None
    assert "HookedData.transfer_batch" in reason_off(State(Listening(), HookedData()), learns=True)
    assert "dataloader_iter" in reason_off(State(Iterating()), learns=False)
    assert fetches_itself(State(Iterating())) and not fetches_itself(State(Listening()))


def test_a_hook_that_was_replaced_on_the_object_counts():
    module = Listening()
    module.on_before_batch_transfer = lambda batch, dataloader_idx: batch
    assert reason_off(State(module), learns=True) is not None


def test_knows_the_other_name_of_lightning():
    assert reason_off(State(pytorch_lightning.LightningModule()), learns=True) is None


def test_the_stage_tells_where_no_barrier_was_heard():
    class Fitting:
        class state:
            fn = "fit"

        training = True

    assert LoaderKind().is_training(Fitting)
