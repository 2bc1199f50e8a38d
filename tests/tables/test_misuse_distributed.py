"""What cannot work with a sharded table raises on every rank and says what to write instead. Nothing hangs."""

from __future__ import annotations

import copy
import functools
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_embrace import EmbRaceStrategy
from tests.support.ranks import RemoteError
from tests.support.training import train
from tests.tables.scripts import Scripted, look

V = 9
_embedding = functools.partial(nn.Embedding, V, 5)
_DATA = [[[look("t", [1, 2])], [look("t", [3])]]] * 2


def _error_on_rank(make_model, data, whole="", **arguments):
    """Fits and returns what was raised, as the user sees it, or None. ``whole`` is a table to exclude."""
    rank = int(os.environ["LOCAL_RANK"])
    strategy = EmbRaceStrategy(tables=["*", f"!{whole}"] if whole else ["*"])
    try:
        train(make_model, [[s[rank]] for s in data], strategy, len(data[0]), **arguments)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


def _errors(ranks, make_model, data=_DATA, **arguments) -> list[str]:
    """Every rank's error; a rank that raised none is a failure of the test."""
    try:
        errors = ranks(len(data[0])).run(_error_on_rank, make_model, data, timeout=60.0, **arguments)
    except RemoteError:
        ranks(len(data[0])).stop()
        raise
    assert None not in errors, errors
    if any(name in error for error in errors for name in ("RankFailedError", "ExchangeError")):
        ranks(len(data[0])).stop()  # somebody may have been left in a collective of Lightning's
    else:
        ranks(len(data[0])).try_run(_whole, timeout=20.0)  # replaces the processes if it fails
    return errors


def _whole() -> None:
    """Whether the default group has survived the failure."""
    dist.all_reduce(torch.ones(1))


class Misuser(Scripted):
    """Does one forbidden thing at one place of the step."""

    def __init__(self, how: str, place: str = "training_step", columns: int = 5) -> None:
        t, bag = (functools.partial(kind, V, columns) for kind in (nn.Embedding, nn.EmbeddingBag))
        super().__init__("sgd", t=t, bag=bag)
        self.how, self.place = how, place

    def misuse(self) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.float64)
        if self.how == "read":
            return zero + self.t.weight.sum()
        if self.how == "functional":
            return F.linear(torch.ones(5, dtype=torch.float64), self.t.weight).sum()
        if self.how == "penalty":
            return zero + sum(p.pow(2).sum() for p in self.parameters())
        if self.how == "functional_call":
            return functional_call(self.t, {"weight": torch.ones(V, 5).double()}, (torch.tensor([1]),)).sum()
        if self.how == "replace":
            self.t.weight = nn.Parameter(torch.ones(V, 5).double())
            return self.t(torch.tensor([1])).sum()
        if self.how == "deepcopy":
            copy.deepcopy(self.t)
        if self.how == "pickle":
            pickle.dumps(self.t)
        if self.how == "float ids":
            return self.t(torch.tensor([1.0, 2.0])).sum()
        if self.how == "weighted mean":
            return self.bag(torch.tensor([[1, 2]]), per_sample_weights=torch.ones(1, 2).double()).sum()
        if self.how == "fp32 weights":
            self.bag.mode = "sum"
            return self.bag(torch.tensor([[1, 2]]), per_sample_weights=torch.ones(1, 2)).sum()
        if self.how == "flat bag":
            return self.bag(torch.tensor([1, 2])).sum()
        raise AssertionError(self.how)

    def loss(self, script):
        loss = super().loss(script)
        return loss + self.misuse() if self.place == "training_step" else loss

    def validation_step(self, batch, batch_idx) -> None:
        self.misuse()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("read", ["`t.weight` was read inside a step", "module(ids)", "tables=['*', '!t']"]),
        ("functional", ["`t.weight` was read inside a step", "tables=['*', '!t']"]),
        ("penalty", ["A gradient reached `", ".weight` other than", "penalty over `parameters()`", "tables=['*', '!"]),
        ("functional_call", ["`t.weight` was replaced", "functional_call", "tables=['*', '!t']"]),
        ("replace", ["`t.weight` was", "tables=['*', '!t']"]),
        ("deepcopy", ["A copy or pickle", "table 't'", "Copy the model before or after `fit`"]),
        ("pickle", ["A copy or pickle", "trainer.save_checkpoint"]),
        ("float ids", ["table 't' must be int32 or int64, but got torch.float32", "ids.long()"]),
    ],
)
def test_in_training_step(ranks, how, words):
    """Every rank raises the same, naming the table and the cure."""
    for error in _errors(ranks, functools.partial(Misuser, how)):
        assert error.startswith("RuntimeError: ")
        for word in words:
            assert word in error


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("weighted mean", "NotImplementedError: Table 'bag': per_sample_weights is only supported for mode='sum', not"),
        (
            "fp32 weights",
            "RuntimeError: Table 'bag': per_sample_weights must have the table's dtype torch.float64, but",
        ),
        ("flat bag", "ValueError: offsets has to be a 1D Tensor but got None"),
    ],
)
def test_bags_that_torch_refuses(ranks, how, words):
    """Refused alike, before anything is sent: an owner must not fail on another rank's request."""
    for error in _errors(ranks, functools.partial(Misuser, how)):
        assert error.startswith(words)


def test_penalty_on_a_rank_without_columns(ranks):
    """With fewer columns than ranks, a rank that owns nothing of the table raises as well."""
    data = [[*step, [look("t", [4])]] for step in _DATA]
    for error in _errors(ranks, functools.partial(Misuser, "penalty", columns=2), data):
        assert "penalty over `parameters()`" in error


@pytest.mark.parametrize("how", ["read", "deepcopy"])
def test_in_validation_step(ranks, how):
    """The same in validation inside fit."""
    for error in _errors(ranks, functools.partial(_Validated, how)):
        assert "'t'" in error or "`t.weight` was read inside a step" in error


class _Validated(Misuser):
    def __init__(self, how: str) -> None:
        super().__init__(how, "validation_step")

    def val_dataloader(self):
        return DataLoader([torch.zeros(1)], batch_size=None)


def _after_failure_on_rank(make_model, data):
    """What a look-up and a second fit say after a fit that failed."""
    said = []
    kept = []

    def make():
        kept.append(make_model())
        return kept[0]

    assert _error_on_rank(make, data) is not None
    with pytest.raises(RuntimeError) as raised:
        kept[0].t(torch.tensor([1]))
    said.append(str(raised.value))
    rank = int(os.environ["LOCAL_RANK"])
    with pytest.raises(ValueError, match="still sharded") as raised:
        train(lambda: kept[0], [[s[rank]] for s in data], EmbRaceStrategy(tables=["*"]), len(data[0]))
    return [*said, str(raised.value)]


def test_model_after_a_failed_fit(ranks):
    """Nothing was gathered: the model says that it is still sharded, and what to do."""
    try:
        outcomes = ranks(2).run(_after_failure_on_rank, functools.partial(Misuser, "read"), _DATA, timeout=60.0)
    finally:
        ranks(2).stop()
    for said in outcomes:
        for text in said:
            assert "Table 't' is still sharded" in text
            assert "Build the model anew and load its last checkpoint" in text


class Manual(Scripted):
    """Manual optimization with a mistake."""

    def __init__(self, how: str) -> None:
        super().__init__("sgd", t=_embedding)
        self.how = how
        self.automatic_optimization = False
        self.kept = []
        if how == "stale":
            self.scale = None  # torch itself refuses to go back through a parameter that has changed

    def training_step(self, scripts, batch_idx) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(scripts[0])
        if self.how == "loss.backward":
            loss.backward()
        elif self.how == "only dense":
            (self.scale**2).backward()
        elif self.how == "stale":
            self.kept.append(loss)
            self.manual_backward(self.kept[0], retain_graph=True)
        optimizer.step()


@pytest.mark.parametrize(
    ("how", "replicated", "names"),
    [("loss.backward", "", "t, scale"), ("loss.backward", "t", "scale, t"), ("only dense", "", "scale")],
)
def test_backward_without_synchronising(ranks, how, replicated, names):
    """``loss.backward()`` in manual optimization: the step has used this rank's gradients alone.

    Regression: that went unnoticed where no sharded table was involved.
    """
    for error in _errors(ranks, functools.partial(Manual, how), whole=replicated):
        assert f"the gradients of {names} have not been synchronised" in error
        assert "Call `self.manual_backward(loss)` instead of `loss.backward()`" in error


def test_backward_through_an_old_lookup(ranks):
    """A graph kept from before the optimizer's step: the owners no longer know which rows were meant."""
    for error in _errors(ranks, functools.partial(Manual, "stale")):
        assert "look-up in table 't' that was made before the table's optimizer last stepped" in error


class OutsideStep(Callback):
    """Differentiates through a look-up that was made outside ``training_step``."""

    def on_train_batch_end(self, trainer, model, *args) -> None:
        with torch.enable_grad():
            values = model.t(torch.tensor([1, 2]))
            assert values.requires_grad
            # the gradient of the values is the user's to take
            assert torch.autograd.grad(values.sum(), values)[0].shape == (2, 5)
            model.t(torch.tensor([1, 2])).sum().backward()


def test_backward_outside_a_training_step(ranks):
    """There the ranks exchange no gradients: silently none would be wrong."""
    for error in _errors(ranks, _scripted, callbacks=[OutsideStep()]):
        assert "look-up in table 't' that was made outside `training_step`" in error


_scripted = functools.partial(Scripted, "sgd", t=_embedding)


@pytest.mark.parametrize("table", ["t", "bag"])
@pytest.mark.parametrize(
    "bad", [V, -1, -100, 2**31 + 1, 2**32 + 1, -(2**33), torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min]
)
def test_bad_id_in_training(ranks, table, bad):
    """One rank's bad id raises IndexError on every rank; ids beyond 32 bits do not wrap on their way."""
    tables = {"t": _embedding, "bag": functools.partial(nn.EmbeddingBag, V, 4)}
    ids = [[1, bad, 2]]
    data = [[[look("t", [1])], [look("t", [1]), look(table, ids)], []]]
    if (table, bad) not in {("t", V), ("t", 2**32 + 1), ("bag", -100)}:
        data = [[[look(table, ids)]]]  # the check itself is local: one rank is enough
    make = functools.partial(Scripted, "sgd", **tables)
    for error in _errors(ranks, make, data):
        rank = len(data[0]) // 2
        assert error.startswith(f"IndexError: Rank {rank} looked up id {bad} in table {table!r}, whose ids range")
        assert f"from 0 to {V - 1}" in error
        assert "Ids outside that range must be mapped to a valid row" in error


def test_bad_padding_in_training(ranks):
    """−100 as padding is a bad id also where it is the module's ``padding_idx`` that was meant."""
    t = functools.partial(_embedding, padding_idx=0)
    data = [[[look("t", [1, -100])], [look("t", [1])]]]
    for error in _errors(ranks, functools.partial(Scripted, "sgd", t=t), data):
        assert "Rank 0 looked up id -100" in error
        assert "`padding_idx`" in error


class OneCollects(Scripted):
    def training_step(self, scripts, batch_idx):
        if self.global_rank == 0:
            self.all_gather(torch.ones(1))
        return self.loss(scripts[0])


def test_collective_on_one_rank_only(ranks):
    """A collective in ``training_step`` that one rank skips: ddp hangs, here every rank says which."""
    for error in _errors(ranks, functools.partial(OneCollects, "sgd", t=_embedding)):
        assert "rank(s) [0] called a collective" in error
        assert "rank(s) [1] did not" in error


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (functools.partial(_embedding, sparse=True, scale_grad_by_freq=True), "scale_grad_by_freq is not supported"),
        (functools.partial(nn.EmbeddingBag, V, 5, sparse=True, mode="max"), "mode='max' is not supported with sparse"),
        (functools.partial(nn.EmbeddingBag, V, 5, scale_grad_by_freq=True, mode="max"), "is not supported with scale"),
    ],
)
def test_what_torch_refuses(ranks, module, message):
    """Refused before step 1, on every rank."""
    for error in _errors(ranks, functools.partial(Scripted, "sgd", t=module)):
        assert message in error
        assert "'t'" in error
