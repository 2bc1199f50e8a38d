"""What is refused before the first step, and what must not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_embrace.optim import SGD, Adagrad, Adam, AdamW
from lightning_embrace.optim.check import check_optimizers
from lightning_embrace.optim.kinds import ELEMENTWISE, ROW_SPARSE
from lightning_embrace.tables.find import Place, TableSpec


def table(sparse: bool = False, place: Place = "sharded") -> TableSpec:
    return TableSpec("words", nn.Parameter(torch.zeros(7, 4)), (7, 4), sparse=sparse, place=place)


def check(spec: TableSpec, make: Callable[..., Optimizer], **options: Any) -> None:
    check_optimizers([make([spec.parameter], **options)], [spec])


class Signs(Optimizer):
    """Elementwise and unknown to us."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.1})

    def update(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad.sign()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                p.add_(self.update(p, grad), alpha=-group["lr"])


class Normalized(Signs):
    """One norm per parameter, as in LARS and LAMB."""

    def update(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm()


class CoupledRows(Signs):
    """Treats each row as one, as a row-wise Adagrad does."""

    def update(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.pow(2).mean(dim=1, keepdim=True).sqrt()


class CoupledWhenLarge(Signs):
    """Factors its state from 128 rows and columns on, which a tiny trial would not notice."""

    def update(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return CoupledRows.update(self, p, grad) if min(p.shape) >= 128 else grad.sign()  # type: ignore[arg-type]


class CoupledLater(Signs):
    """Couples columns from its fifth step on."""

    steps = 0

    def update(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return grad.sign() if self.steps < 5 else grad / grad.norm()


class OwnAdamW(torch.optim.AdamW):
    """Sets what its constructor does not take: `decoupled_weight_decay`."""


class OwnKeywords(Signs):
    """Hides what it takes."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


class NeedsMore(Signs):
    """Cannot be built from parameters and options alone."""

    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params)


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda k: k.__name__))
def test_known_elementwise_optimizers_are_elementwise(kind: type[Optimizer]) -> None:
    """They are believed without a trial: the trial, asked, agrees. Else shards would train to other numbers."""
    from lightning_embrace.optim.check import _try_on_columns

    sparse = kind is torch.optim.SparseAdam
    optimizer = kind([nn.Parameter(torch.zeros(2))])  # type: ignore[call-arg]
    assert _try_on_columns(optimizer, optimizer.param_groups[0], sparse) is None
    if kind in ROW_SPARSE:
        assert _try_on_columns(optimizer, optimizer.param_groups[0], True) is None
    check(table(sparse), kind)


@pytest.mark.parametrize("place", ["sharded", "replicated"])
@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adafactor, torch.optim.LBFGS]
)
def test_sparse_table_needs_an_optimizer_that_takes_it(kind: type[Optimizer], place: Place) -> None:
    """As torch refuses it in its first step, and before anything was sent."""
    ours = "AdamW" if kind is torch.optim.AdamW else "Adam"
    message = rf"'words' has sparse=True, and {kind.__name__} .*optim\.{ours} .*SparseAdam, or sparse=False"
    with pytest.raises(ValueError, match=message):
        check(table(sparse=True, place=place), kind)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_weight_decay_with_a_sparse_table(kind: type[Optimizer]) -> None:
    message = (
        rf"'words'.*weight_decay=0.1 is not compatible.*weight_decay=0\..*lightning_embrace\.optim\.{kind.__name__},"
    )
    with pytest.raises(ValueError, match=message):
        check(table(sparse=True), kind, weight_decay=0.1)
    check(table(sparse=True), kind)
    check(table(), kind, weight_decay=0.1)


@pytest.mark.parametrize("kind", [SGD, Adagrad, Adam, AdamW])
@pytest.mark.parametrize("sparse", [False, True])
def test_ours_train_both_kinds_of_tables(kind: type[Optimizer], sparse: bool) -> None:
    """Being subclasses of torch's, they were refused where torch's are."""
    check(table(sparse), kind, weight_decay=0.1)
    check(table(sparse, place="replicated"), kind, weight_decay=0.1)


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_settings_that_ours_refuse_for_sparse_tables_are_refused_before_the_first_step(kind: type[Optimizer]) -> None:
    message = rf"'words' has sparse=True, and amsgrad=True of lightning_embrace\.optim\.{kind.__name__} .*amsgrad=False"
    with pytest.raises(ValueError, match=message):
        check(table(sparse=True), kind, amsgrad=True)
    check(table(), kind, amsgrad=True)


def test_weight_decay_of_another_group_is_none_of_the_table_s_business() -> None:
    spec, other = table(sparse=True), nn.Parameter(torch.zeros(2))
    groups = [{"params": [spec.parameter]}, {"params": [other], "weight_decay": 0.1}]
    check_optimizers([torch.optim.SGD(groups, lr=0.1)], [spec])


@pytest.mark.parametrize("place", ["sharded", "replicated"])
def test_sparse_adam_needs_a_sparse_table(place: Place) -> None:
    with pytest.raises(ValueError, match=r"'words' has sparse=False, and SparseAdam .*Use sparse=True.*optim\.Adam"):
        check(table(place=place), torch.optim.SparseAdam)


def test_a_tied_table_has_a_dense_gradient_whatever_it_asks_for() -> None:
    spec = table(sparse=True, place="dense")
    check(spec, torch.optim.Adam, weight_decay=0.1)
    with pytest.raises(ValueError, match="tied weight, and SparseAdam"):
        check(spec, torch.optim.SparseAdam)


def test_frozen_and_foreign_tables_are_not_checked() -> None:
    check(table(sparse=True, place="frozen"), torch.optim.Adam)
    elsewhere = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    check_optimizers([elsewhere], [table(sparse=True)])


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, Normalized, CoupledRows, CoupledWhenLarge, CoupledLater])
def test_coupling_between_columns_is_found_by_trial(kind: type[Optimizer]) -> None:
    """On shards such an optimizer would train on, to other numbers than on the whole table."""
    with pytest.raises(ValueError, match=rf"{kind.__name__} couples columns.*tables=\['\*', '!words'\]"):
        check(table(), kind)
    check(table(place="replicated"), kind)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
def test_muon_couples_columns() -> None:
    with pytest.raises(ValueError, match="Muon couples columns"):
        check(table(), torch.optim.Muon)


@pytest.mark.parametrize("sparse", [False, True])
def test_an_elementwise_optimizer_of_one_s_own_is_accepted(sparse: bool) -> None:
    """Also with weight decay and sparse gradients: whether it can is its own affair, the trial shows that it does."""
    check(table(sparse), Signs)


@pytest.mark.parametrize("kind", [OwnAdamW, OwnKeywords])
def test_constructors_that_do_not_say_what_they_take(kind: type[Optimizer]) -> None:
    """The trial passed every setting to the constructor, and subclasses of torch's AdamW were refused."""
    check(table(), kind, lr=0.3)


def test_an_optimizer_that_cannot_be_tried_is_refused_with_the_reason() -> None:
    spec = table()
    with pytest.raises(ValueError, match=r"could not be tried.*TypeError.*model.*tables="):
        check_optimizers([NeedsMore([spec.parameter], nn.Linear(1, 1))], [spec])


class Twice(Signs):
    """Evaluates the model twice in a step, and steps on nothing else."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        closure()
        super().step()


def test_an_optimizer_that_needs_a_closure_is_tried_with_one() -> None:
    """LBFGS couples everything with everything, and was refused for the wrong reason; another one need not."""
    check(table(), Twice)
    with pytest.raises(ValueError, match=r"LBFGS couples columns.*tables=\['\*', '!words'\]"):
        check(table(), torch.optim.LBFGS)


def test_the_trial_leaves_the_optimizer_and_the_random_numbers_alone() -> None:
    spec = table()
    optimizer = Signs([spec.parameter])
    before = torch.get_rng_state()
    check_optimizers([optimizer], [spec])
    assert torch.equal(torch.get_rng_state(), before)
    assert optimizer.state == {}
    assert not spec.parameter.any()
