"""A step applied in parts or later has the numbers of one whole step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_embrace.optim import SGD, Adagrad, Adam, AdamW
from lightning_embrace.optim.kinds import ELEMENTWISE, ROW_SPARSE
from lightning_embrace.optim.parts import apply_late, snapshot, snapshot_group
from lightning_embrace.optim.split import splits
from tests.optim.gradients import COLUMNS, ROWS, all_rows, coo, rate, same_state, some_rows, weight

# per step: rows with a gradient (repeated at times), and those of them that come late
Steps = list[tuple[list[int], set[int]]]
STEPS = st.lists(
    st.tuples(st.lists(st.integers(0, ROWS - 1), max_size=9), st.sets(st.integers(0, ROWS - 1))), min_size=1, max_size=6
)
SPARSE: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"maximize": True}),
    (torch.optim.Adagrad, {"lr_decay": 0.1}),
    (torch.optim.SparseAdam, {}),
    (Adam, {"weight_decay": 0.1}),
    (AdamW, {"weight_decay": 0.1, "maximize": True}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "dampening": 0.5}),
    (SGD, {}),
    (Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
]
DENSE: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (SGD, {"maximize": True, "foreach": True}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "foreach": True}),
    (Adagrad, {"initial_accumulator_value": 0.5}),
]


def in_parts(optimizer: Optimizer, parameter: nn.Parameter, first: Tensor, late: Tensor, lr: float) -> None:
    """One step as the engine makes it: the first part with the optimizer, the late one after the scheduler."""
    optimizer.param_groups[0]["lr"] = lr
    parameter.grad = first
    optimizer.step()
    at_step = snapshot(optimizer, parameter)
    optimizer.param_groups[0]["lr"] = 1e3
    parameter.grad = None
    apply_late(optimizer, parameter, late, at_step, counted=True)
    assert parameter.grad is None


def whole(optimizer: Optimizer, parameter: nn.Parameter, grad: Tensor, lr: float) -> None:
    optimizer.param_groups[0]["lr"] = lr
    parameter.grad = grad
    optimizer.step()


def assert_same(a: Optimizer, x: nn.Parameter, b: Optimizer, y: nn.Parameter) -> None:
    torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    ours, theirs = a.state_dict()["state"], b.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index in ours:
        torch.testing.assert_close(ours[index], theirs[index], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "options"), SPARSE)
@settings(deadline=None, max_examples=25)
@given(steps=STEPS)
def test_sparse_rows_in_parts(kind: Any, options: dict[str, Any], steps: Steps) -> None:
    """Whatever comes late, if only in the first step, and where either part has no rows."""
    a, b = weight(), weight()
    parts, one = kind([a], lr=1.0, **options), kind([b], lr=1.0, **options)
    assert splits(parts, parts.param_groups[0], sparse=True) is None
    generator = torch.Generator().manual_seed(0)
    for step, (ids, delayed) in enumerate(steps):
        values = torch.randn(len(ids), COLUMNS, generator=generator, dtype=torch.float64)
        late = torch.tensor([i in delayed for i in ids], dtype=torch.bool)
        chosen = torch.tensor(ids, dtype=torch.int64)
        whole(one, b, coo(ids, values), rate(step))
        first, second = (coo(chosen[m].tolist(), values[m]) for m in (~late, late))
        in_parts(parts, a, first, second, rate(step))
        untouched = torch.tensor([i not in ids for i in range(ROWS)])
        if step == 0:
            assert torch.equal(a[untouched], weight()[untouched])
        assert_same(parts, a, one, b)


@pytest.mark.parametrize(("kind", "options"), DENSE)
@settings(deadline=None, max_examples=25)
@given(steps=STEPS)
def test_dense_rows_in_parts(kind: Any, options: dict[str, Any], steps: Steps) -> None:
    """The first part is dense with zeros where rows come late or have no gradient; the late part is sparse."""
    a, b = weight(), weight()
    parts, one = kind([a], lr=1.0, **options), kind([b], lr=1.0, **options)
    assert splits(parts, parts.param_groups[0], sparse=False) is None
    generator = torch.Generator().manual_seed(0)
    for step, (ids, delayed) in enumerate(steps):
        values = torch.randn(len(ids), COLUMNS, generator=generator, dtype=torch.float64)
        late = torch.tensor([i in delayed for i in ids], dtype=torch.bool)
        chosen = torch.tensor(ids, dtype=torch.int64)
        whole(one, b, coo(ids, values).to_dense(), rate(step))
        first, second = (coo(chosen[m].tolist(), values[m]) for m in (~late, late))
        in_parts(parts, a, first.to_dense(), second, rate(step))
        assert_same(parts, a, one, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "options"), DENSE)
def test_a_zero_gradient_moves_nothing_of_what_splits_densely(
    kind: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """The dense split stands on this, bit by bit: zeros stand where rows come late."""
    parameter = weight(dtype=dtype)
    optimizer = kind([parameter], lr=0.1, **options)
    for grad in all_rows(9, dtype=dtype):
        grad[3:] = 0
        parameter.grad = grad
        optimizer.step()
    assert torch.equal(parameter[3:], weight(dtype=dtype)[3:])
    if "sum" in optimizer.state[parameter]:
        start = options.get("initial_accumulator_value", 0.0)
        assert torch.equal(optimizer.state[parameter]["sum"][3:], torch.full((ROWS - 3, COLUMNS), start, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, Adagrad, torch.optim.SGD, SGD])
def test_late_rows_of_a_dense_table_differ_by_rounding_at_most(kind: Any, dtype: torch.dtype) -> None:
    """SGD's bits are those of the whole step. torch's sparse Adagrad divides before it scales: a few ulp."""
    a, b = weight(dtype=dtype), weight(dtype=dtype)
    parts, one = kind([a], lr=0.1), kind([b], lr=0.1)
    for step, grad in enumerate(all_rows(30, dtype=dtype)):
        first = grad.clone()
        first[3:] = 0
        whole(one, b, grad, rate(step))
        in_parts(parts, a, first, coo(range(3, ROWS), grad[3:]), rate(step))
    exact = 0.0 if issubclass(kind, torch.optim.SGD) else 30 * torch.finfo(dtype).eps
    torch.testing.assert_close(a, b, rtol=0, atol=exact)


def gradients_for(kind: type[Optimizer], steps: int, seed: int) -> Iterator[Tensor]:
    return some_rows(steps, seed) if kind is torch.optim.SparseAdam else all_rows(steps, seed)


@pytest.mark.parametrize("options", [{}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda k: f"{k.__module__}.{k.__name__}"), ids=str)
def test_a_parameter_stepped_later_has_the_numbers_of_its_optimizer_s_step(kind: Any, options: dict[str, Any]) -> None:
    """Bit by bit, in any order, from the first step on, with the settings of the step and one count a step."""
    mine, theirs = [weight(i) for i in range(3)], [weight(i) for i in range(3)]
    groups = [{"params": mine[:2]}, {"params": mine[2:], "lr": 0.5}]
    deferred = kind(groups, lr=0.1, **options)
    barrier = kind([{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0.5}], lr=0.1, **options)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (deferred, barrier)]
    for grads in zip(*(gradients_for(kind, 9, seed=i) for i in range(3))):
        for p, grad in zip(theirs, grads):
            p.grad = grad.clone()
        barrier.step()
        mine[0].grad = grads[0].clone()
        deferred.step()
        at_step = [snapshot(deferred, p) for p in mine]
        for scheduler in schedulers:
            scheduler.step()
        for i in (2, 1):
            apply_late(deferred, mine[i], grads[i].clone(), at_step[i], counted=False)
    assert same_state(deferred.state_dict(), barrier.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


@pytest.mark.parametrize("kind", [torch.optim.Adam, Adam], ids=str)
@pytest.mark.parametrize("options", [{"amsgrad": True, "weight_decay": 0.1}, {"foreach": True}], ids=str)
def test_deferral_with_further_settings(kind: Any, options: dict[str, Any]) -> None:
    a, b = weight(), weight()
    deferred, barrier = kind([a], **options), kind([b], **options)
    for grad in all_rows(9):
        whole(barrier, b, grad.clone(), 0.1)
        deferred.param_groups[0]["lr"] = 0.1
        deferred.step()
        apply_late(deferred, a, grad.clone(), snapshot(deferred, a), counted=False)
    assert torch.equal(a, b)
    assert same_state(deferred.state_dict(), barrier.state_dict())


def test_a_learning_rate_that_is_a_tensor_is_copied() -> None:
    """Schedulers fill such a tensor in place."""
    parameter = weight()
    start = parameter.detach().clone()
    lr = torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.SGD([parameter], lr=lr)
    at_step = snapshot(optimizer, parameter)
    lr.fill_(100.0)
    apply_late(optimizer, parameter, torch.ones_like(parameter), at_step, counted=False)
    assert torch.equal(parameter.detach(), start - 0.5)


def test_tensors_inside_of_settings_are_copied() -> None:
    betas = (torch.tensor(0.5), torch.tensor(0.9))
    optimizer = torch.optim.Adam([weight()], betas=betas)
    kept = snapshot_group(optimizer.param_groups[0]).values["betas"]
    betas[0].fill_(0.0)
    assert kept == (torch.tensor(0.5), torch.tensor(0.9))


@pytest.mark.skipif(torch.__version__.startswith("2.5"), reason="torch before 2.6 takes no named parameters")
def test_named_parameters() -> None:
    """torch keeps their names in the group, as many as parameters: not a setting."""
    parameter = weight()
    optimizer = torch.optim.SGD([("words", parameter), ("other", weight(1))], lr=0.1)
    apply_late(optimizer, parameter, torch.ones_like(parameter), snapshot(optimizer, parameter), counted=False)
    assert torch.equal(parameter.detach(), weight().detach() - 0.1)


def test_no_hook_and_no_scheduler_sees_a_late_part() -> None:
    parameter = weight()
    optimizer = Adam([parameter])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    parameter.grad = next(some_rows(1))
    optimizer.step()
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append("global"))
    count = getattr(optimizer, "_opt_called", None)
    optimizer._opt_called = False  # type: ignore[attr-defined]
    kept = parameter.grad
    try:
        apply_late(optimizer, parameter, next(some_rows(1)), snapshot(optimizer, parameter), counted=True)
    finally:
        handle.remove()
    assert seen == [] and count is True and optimizer._opt_called is False  # type: ignore[attr-defined]
    assert parameter.grad is kept and scheduler.last_epoch == 0


def test_sgd_without_momentum_keeps_no_state() -> None:
    """Its state dict would else hold an empty entry that a run without deferral does not have."""
    parameter = weight()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    apply_late(optimizer, parameter, next(all_rows(1)), snapshot(optimizer, parameter), counted=False)
    apply_late(optimizer, parameter, next(some_rows(1)), snapshot(optimizer, parameter), counted=True)
    assert optimizer.state_dict()["state"] == {}


def test_state_that_a_late_part_creates_is_the_optimizer_s() -> None:
    """SGD counts no steps: a late part may be the first that it sees."""
    parameter = weight()
    optimizer = SGD([parameter], lr=0.1, momentum=0.9)
    grad = coo([1], torch.ones(1, COLUMNS).double())
    apply_late(optimizer, parameter, grad, snapshot(optimizer, parameter), counted=True)
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], grad.to_dense())


def test_late_parts_go_on_in_the_very_state_of_the_optimizer() -> None:
    """Also in tensors that something else holds on to, and in a state that was loaded."""
    parameter = weight()
    optimizer = Adam([parameter])
    parameter.grad = next(some_rows(1))
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = optimizer.state[parameter]
    before = dict(state)
    moved = state["exp_avg"].clone()
    apply_late(
        optimizer, parameter, coo([6], torch.ones(1, COLUMNS).double()), snapshot(optimizer, parameter), counted=True
    )
    assert optimizer.state[parameter] is state
    assert all(state[key] is before[key] for key in before)
    assert state["step"] == 1 and not torch.equal(state["exp_avg"], moved)


def test_a_late_part_before_the_first_is_a_mistake() -> None:
    parameter = weight()
    optimizer = Adam([parameter])
    with pytest.raises(AssertionError, match="first part"):
        apply_late(optimizer, parameter, next(some_rows(1)), snapshot(optimizer, parameter), counted=True)


def test_a_step_that_fails_gives_the_gradient_back() -> None:
    parameter = weight()
    parameter.grad = kept = torch.ones_like(parameter)
    optimizer = torch.optim.Adam([parameter])
    with pytest.raises(RuntimeError, match="sparse"):
        apply_late(optimizer, parameter, next(some_rows(1)), snapshot(optimizer, parameter), counted=False)
    assert parameter.grad is kept


def test_a_parameter_of_another_optimizer() -> None:
    with pytest.raises(ValueError, match=r"shape \(7, 5\) is in no group of SGD"):
        snapshot(torch.optim.SGD([weight()]), weight())


def test_every_class_of_ours_is_tried_in_parts() -> None:
    assert {kind for kind, _ in SPARSE} >= ROW_SPARSE
