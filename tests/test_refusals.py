"""What is refused before training says what to write instead, and leaves the model as it was."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from tests.support.lifecycle import assert_same, loader, make_model, make_strategy, make_trainer, plain, results
from tests.support.models import batches, concatenated

DATA = [concatenated(step) for step in batches(3, 2)]


def refused(match: str, error: type[Exception] = MisconfigurationException, model: Any = None, **arguments: Any) -> Any:
    """Fits in this process; nothing may have been changed when the error comes."""
    model = model or make_model()
    before = plain(dict(model.state_dict()))
    trainer = make_trainer(make_strategy("embrace"), 1, **arguments)
    with pytest.raises(error, match=match) as info:
        trainer.fit(model, DataLoader(DATA, batch_size=None))
    assert type(model.words) is nn.Embedding
    assert_same(plain(dict(model.state_dict())), before)
    return str(info.value)


class Scaler:
    """Scales the loss in its own way."""


def test_a_scaler_of_one_s_own():
    """It decides alone whether to step: ranks could disagree on an overflow."""
    plugin = MixedPrecision("16-mixed", "cpu", Scaler())
    message = refused("is a Scaler, of which the ranks could not", precision=None, plugins=plugin)
    assert "torch.amp.GradScaler" in message and "bf16-mixed" in message


def average(strategy: str, callback: str) -> Any:
    made = {
        "swa": lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=1),
        "ema": lambda: EMAWeightAveraging(decay=0.5),
    }[callback]()
    model = make_model()
    trainer = make_trainer(make_strategy(strategy, tables=[]), max_epochs=3, callbacks=[made])
    trainer.fit(model, loader(3), loader(2, 5))
    return results(model, trainer)


@pytest.mark.parametrize("callback", ["swa", "ema"])
def test_weight_averaging_of_whole_tables(ranks, callback):
    """With all tables whole the callbacks do what they do under DDP."""
    expected = ranks(2).run(average, "ddp", callback)
    assert_same(ranks(2).run(average, "embrace", callback), expected)


def wrong_optimizer(world_size: int, failure: str) -> Any:
    """Adam for a sparse table is refused; then the same model goes on with another optimizer."""
    model = make_model(5, True, "adam")
    if failure == "own":
        model.configure_optimizers = lambda: 1 / 0
    before = plain(dict(model.state_dict()))
    trainer = make_trainer(make_strategy("embrace"), world_size)
    with pytest.raises((ValueError, ZeroDivisionError)) as info:
        trainer.fit(model, loader(3))
    assert "sparse" in str(info.value) or failure == "own"
    assert_same(plain(dict(model.state_dict())), before)
    assert model.words.weight.shape == (23, 5) and type(model.words) is nn.Embedding
    trainer.save_checkpoint(os.devnull)
    return fit_again("embrace", world_size, model)


def fit_again(strategy: str, world_size: int, model: Any = None) -> Any:
    model = model or make_model(5, True, "adam")
    model.hparams["optimizer"] = "adagrad"
    model.__dict__.pop("configure_optimizers", None)
    trainer = make_trainer(make_strategy(strategy), world_size)
    trainer.fit(model, loader(3))
    return results(model, trainer)


@pytest.mark.parametrize(("world_size", "failure"), [(1, "own"), (2, "own"), (2, "refused")])
def test_model_is_whole_after_a_failed_setup(ranks, world_size, failure):
    """What is wrong with an optimizer shows when the tables are sharded already: they used to stay so."""
    got = ranks(world_size).run(wrong_optimizer, world_size, failure)
    assert_same(got, ranks(world_size).run(fit_again, "ddp", world_size))


def test_interrupted_model():
    """A model that was left sharded is refused with the way out."""
    from lightning_embrace.refusals import check_model

    model = make_model()
    model.words.__dict__["_embrace_class"] = torch.nn.Embedding
    with pytest.raises(ValueError, match=r"'words' is still sharded.*Build the model anew"):
        check_model(model)
