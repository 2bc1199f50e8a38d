"""The life cycle under a Trainer: fit, validate, test, predict, and what is left behind, compared with DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader

from tests.support.lifecycle import (
    At,
    Whole,
    assert_same,
    loader,
    make_model,
    make_strategy,
    make_trainer,
    plain,
    results,
    this_rank,
)
from tests.support.models import batches


def same_under_both(ranks: Any, function: Any, *arguments: Any, world_size: int = 2, **named: Any) -> list[Any]:
    """Runs ``function(strategy, ...)`` under both strategies on the same workers; the results must be equal."""
    theirs = ranks(world_size).run(function, "ddp", *arguments, **named)
    ours = ranks(world_size).run(function, "embrace", *arguments, **named)
    for rank, (left, right) in enumerate(zip(ours, theirs)):
        assert_same(left, right, f"rank {rank}")
    return ours


def whole_life(strategy: str) -> Any:
    """Evaluates, fits with a sanity check and validation in the middle of epochs, and evaluates again."""
    model = make_model()
    trainer = make_trainer(
        make_strategy(strategy), max_epochs=2, num_sanity_val_steps=2, val_check_interval=2, enable_model_summary=True
    )
    data, held_out = loader(4), loader(3, seed=5)
    before = [trainer.validate(model, held_out, verbose=False), trainer.test(model, held_out, verbose=False)]
    before.append(plain(trainer.predict(model, held_out)))
    trainer.fit(model, data, held_out)
    fitted = results(model, trainer)
    after = [trainer.validate(model, held_out, verbose=False), trainer.test(model, held_out, verbose=False)]
    after.append(plain(trainer.predict(model, held_out)))
    return before, fitted, after, results(model, trainer)


def test_whole_life(ranks):
    """Every stage, before, inside and after a fit, gives DDP's numbers on every rank."""
    same_under_both(ranks, whole_life)


class Samples(torch.utils.data.Dataset[Any]):
    """Single samples: Lightning's own distributed sampler gives 3 and 2 of 5 to two ranks when predicting."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        step = batches(1, 1, size=5)[0][0]
        return {"ids": step["ids"][index], "target": step["target"][index]}


class Alone(Callback):
    """Rank 0 alone looks rows up between batches, while rank 1 goes on."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def look(self, module: Any) -> None:
        if this_rank() == 0:
            with torch.no_grad():
                self.outputs.append(module(batches(1, 1, seed=9)[0][0]["ids"]))

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.look(module)

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.look(module)

    def on_predict_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.look(module)


class Local(Whole):
    """Unequal numbers of validation batches cannot be logged with ``sync_dist``."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.append(float(self.loss(batch)))


def uneven(strategy: str) -> Any:
    """Validates unequal numbers of batches inside fit, predicts 3 and 2 samples, looks up on rank 0 alone."""
    model, alone = make_model(cls=Local), Alone()
    trainer = make_trainer(make_strategy(strategy), callbacks=[alone])
    trainer.fit(model, loader(3), loader((3, 1)[this_rank()], seed=5))
    predictor = make_trainer(make_strategy(strategy), callbacks=[alone], use_distributed_sampler=True)
    predicted = predictor.predict(model, DataLoader(Samples(), batch_size=1))
    assert len(predicted) == (3 if this_rank() == 0 else 2)
    return results(model, trainer), plain(predicted), plain(alone.outputs)


def test_no_partner_needed_outside_training_steps(ranks):
    """Ranks evaluate unequal numbers of batches, and one rank looks up alone; under DDP that needs no partner."""
    (_, _, outputs), (_, _, none) = same_under_both(ranks, uneven)
    assert len(outputs) == 3 + 3 + 3 and none == []


def twice(strategy: str, new_trainer: bool, optimizer: str) -> Any:
    model = make_model(5, False, optimizer)
    trainer = make_trainer(make_strategy(strategy))
    trainer.fit(model, loader(3))
    first = results(model, trainer)
    if new_trainer:
        trainer = make_trainer(make_strategy(strategy))
    else:
        trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(3, seed=3))
    return first, results(model, trainer), trainer.global_step


@pytest.mark.parametrize(("new_trainer", "optimizer"), [(False, "adam"), (True, "adagrad")])
def test_fit_twice(ranks, new_trainer, optimizer):
    """A second fit starts from where the first ended, with the same Trainer or another."""
    same_under_both(ranks, twice, new_trainer, optimizer)


def ordinary_again(strategy: str, sparse: bool, optimizer: str) -> Any:
    model = make_model(5, sparse, optimizer)
    parameters = list(model.parameters())
    trainer = make_trainer(make_strategy(strategy))
    trainer.fit(model, loader(3))
    assert [type(m) for m in (model.words, model.bags)] == [nn.Embedding, nn.EmbeddingBag]
    assert all(p is q for p, q in zip(model.parameters(), parameters))
    for p in model.parameters():
        p.grad = None
        assert not p._backward_hooks and not p._post_accumulate_grad_hooks
    optimizers = trainer.optimizers
    for batch in [step[0] for step in batches(2, 1, seed=7)]:
        optimizers[0].zero_grad()
        model.loss(batch).backward()
        assert model.words.weight.grad.shape == (23, 5) and model.words.weight.grad.is_sparse == sparse
        optimizers[0].step()
    return plain(dict(model.state_dict())), plain(optimizers[0].state_dict())


@pytest.mark.parametrize(("sparse", "optimizer"), [(False, "adam"), (True, "momentum"), (True, "sparseadam")])
def test_model_is_ordinary_after_fit(ranks, sparse, optimizer):
    """After a fit, plain steps with the same optimizer object go on where training ended: nothing is left hooked."""
    same_under_both(ranks, ordinary_again, sparse, optimizer)


def local_and_full() -> None:
    from torch.distributed.tensor import DTensor, Shard

    def look(trainer: Any, module: Any) -> None:
        local = module.state_dict()
        full = trainer.strategy.full_state_dict()
        assert list(local) == list(full)
        for name in ("words.weight", "bags.weight"):
            view = local[name]
            assert isinstance(view, DTensor) and view.placements == (Shard(1),) and view.shape == (23, 5)
            start, stop = [(0, 3), (3, 5)][this_rank()]
            assert_same(view.to_local(), full[name][:, start:stop].contiguous())
            assert type(full[name]) is torch.Tensor and full[name].shape == (23, 5)
            assert_same(view.full_tensor(), full[name])
        module.load_state_dict(local)  # both forms can be loaded again
        module.load_state_dict(full)

    model = make_model()
    trainer = make_trainer(make_strategy("embrace"), callbacks=[At("on_train_batch_end", look)])
    before = trainer.strategy
    trainer.fit(model, loader(3))
    assert_same(plain(before.full_state_dict()), plain(dict(model.state_dict())))


def test_state_dicts_inside_fit(ranks):
    """``module.state_dict()`` is local and shows DTensors, ``strategy.full_state_dict()`` is whole on every rank."""
    ranks(2).run(local_and_full)
