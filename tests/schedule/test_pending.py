"""Late updates: applied before they are seen, once, with the numbers that their step had."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace import optim
from lightning_embrace.monitor.timeline import Timeline
from lightning_embrace.schedule.pending import PendingUpdates


class Gradients:
    """On their way until somebody waits for them; counts how often."""

    def __init__(self, pairs: list[tuple[nn.Parameter, Tensor | None]], counted: bool = False) -> None:
        self.parameters = [p for p, _ in pairs]
        self.counted = counted
        self._gradients = [g for _, g in pairs]
        self.waits = 0

    def gradients(self) -> list[Tensor | None]:
        self.waits += 1
        return self._gradients


def pending() -> PendingUpdates:
    return PendingUpdates(Timeline(0, 1))


def parameter(value: float = 0.0) -> nn.Parameter:
    return nn.Parameter(torch.full((2,), value, dtype=torch.float64))


def ones() -> Tensor:
    return torch.ones(2, dtype=torch.float64)


def test_before_the_step_it_is_an_ordinary_gradient() -> None:
    """Who reads between backward and the step sees it in ``grad``, and the step applies it as any other."""
    updates, p = pending(), parameter()
    late = Gradients([(p, ones())])
    updates.add(late)
    updates.settle(p)
    updates.settle(p)
    assert p.grad is not None and p.grad.tolist() == [1, 1] and late.waits == 1
    optimizer = torch.optim.SGD([p], lr=0.5)
    optimizer.step()
    updates.stepped(optimizer)
    updates.settle_all()
    assert p.tolist() == [-0.5, -0.5]


def test_after_the_step_it_is_applied_with_that_steps_settings() -> None:
    """A scheduler has changed the learning rate meanwhile; the state counts one step."""
    updates, p = pending(), parameter()
    expected = parameter()
    optimizer, plain = (torch.optim.Adam([q], lr=0.5) for q in (p, expected))
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.001)
    expected.grad = ones()
    plain.step()
    updates.add(Gradients([(p, ones())]))
    optimizer.step()
    updates.stepped(optimizer)
    rates.step()
    assert p.tolist() == [0, 0] and p not in optimizer.state
    updates.settle(p)
    assert torch.equal(p, expected)
    assert optimizer.state[p]["step"] == 1


@pytest.mark.parametrize("keep", [True, False])
def test_the_gradient_stays_until_it_would_have_been_removed(keep: bool) -> None:
    """A callback that reads ``grad`` after the step finds it, the next step's `zero_grad` has nothing to find."""
    updates, p = pending(), parameter()
    optimizer = torch.optim.SGD([p], lr=0.5)
    updates.add(Gradients([(p, ones())]))
    optimizer.step()
    updates.stepped(optimizer)
    updates.keep_gradients = keep
    updates.settle(p)
    assert p.tolist() == [-0.5, -0.5]
    assert (p.grad is None) is not keep


def test_what_comes_together_is_applied_together() -> None:
    """One of a block's parameters is read: all of them have arrived."""
    updates, a, b, unused = pending(), parameter(), parameter(), parameter()
    optimizer = torch.optim.SGD([a, b, unused], lr=1.0)
    updates.add(Gradients([(a, ones()), (b, 2 * ones()), (unused, None)]))
    optimizer.step()
    updates.stepped(optimizer)
    updates.settle(b)
    assert (a.tolist(), b.tolist(), unused.tolist()) == ([-1, -1], [-2, -2], [0, 0])
    assert unused.grad is None, "what no rank used keeps no gradient"


def test_the_copy_that_was_kept_is_not_the_buffer() -> None:
    """The buffer carries the next step's gradients while a callback may still look at these."""
    updates, p, buffer = pending(), parameter(), ones()
    updates.add(Gradients([(p, buffer)]))
    updates.settle_all()
    buffer.zero_()
    assert p.grad is not None and p.grad.tolist() == [1, 1]


def test_several_optimizers_and_groups() -> None:
    """Each parameter moves with its own group's settings; another optimizer's step leaves it alone."""
    updates, a, b = pending(), parameter(), parameter()
    groups = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.25}])
    other = torch.optim.SGD([parameter()], lr=9.0)
    updates.add(Gradients([(a, ones()), (b, ones())]))
    other.step()
    updates.stepped(other)
    groups.step()
    updates.stepped(groups)
    groups.param_groups[0]["lr"] = 100.0
    updates.stepped(groups)  # stepped again, say in manual optimization: the first one produced it
    updates.settle_all()
    assert (a.tolist(), b.tolist()) == ([-1, -1], [-0.25, -0.25])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.5),
    "rows of adam": lambda p: optim.Adam(p, lr=0.5),
    "rows of adagrad": lambda p: optim.Adagrad(p, lr=0.5),
    "sparseadam": lambda p: torch.optim.SparseAdam(p, lr=0.5),
}


def rows(ids: list[int], value: float = 1.0) -> Tensor:
    values = torch.full((len(ids), 2), value, dtype=torch.float64)
    places = torch.tensor(ids, dtype=torch.int64).unsqueeze(0)
    return torch.sparse_coo_tensor(places, values, (4, 2), check_invariants=True).coalesce()


@pytest.mark.parametrize("early", [[0, 1], []], ids=["some rows early", "none early"])
@pytest.mark.parametrize("late", [[2, 3], []], ids=["some late", "none late"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_in_two_parts_are_one_step(name: str, early: list[int], late: list[int]) -> None:
    """Also where a part has no rows: it counts as a step, and counts once. Three steps in a row."""
    table, expected = (nn.Parameter(torch.zeros(4, 2, dtype=torch.float64)) for _ in range(2))
    optimizer, plain = (OPTIMIZERS[name]([p]) for p in (table, expected))
    updates = pending()
    for step in range(3):
        expected.grad = rows(early + late, step + 1.0)
        plain.step()
        table.grad = rows(early, step + 1.0)
        updates.add(Gradients([(table, rows(late, step + 1.0))], counted=True))
        optimizer.step()
        updates.stepped(optimizer)
        updates.settle(table)
        torch.testing.assert_close(table, expected, rtol=0, atol=1e-12)
        for key, value in plain.state[expected].items():
            ours = optimizer.state[table][key]
            torch.testing.assert_close(ours, value, rtol=0, atol=1e-12, msg=f"{key} in step {step}")
        torch.testing.assert_close(table.grad.to_dense(), expected.grad.to_dense())


def test_of_a_kind_alone() -> None:
    """Backward waits for dense blocks that the forward pass did not read, and leaves delayed rows on their way."""
    updates, block, table = pending(), parameter(), nn.Parameter(torch.zeros(4, 2, dtype=torch.float64))
    dense, delayed = Gradients([(block, ones())]), Gradients([(table, rows([1]))], counted=True)
    updates.add(dense)
    updates.add(delayed)
    updates.settle_all(counted=False)
    assert (dense.waits, delayed.waits) == (1, 0)
    updates.settle_all(counted=True)
    assert (dense.waits, delayed.waits) == (1, 1)


def test_a_state_that_is_made_in_inference_mode_can_be_trained_with() -> None:
    """Validation is often the first to read: what it settles is no inference tensor."""
    updates, p = pending(), parameter()
    optimizer = torch.optim.Adam([p], lr=0.5)
    updates.add(Gradients([(p, ones())]))
    optimizer.step()
    updates.stepped(optimizer)
    with torch.inference_mode():
        updates.settle(p)
    assert not any(t.is_inference() for t in (*optimizer.state[p].values(), p, p.grad))
    p.grad = ones()
    optimizer.step()
    (p * p).sum().backward()


def test_threads_apply_it_once() -> None:
    """The thread that answers other ranks reads while the training does; nobody sees half of it."""
    updates, parameters = pending(), [parameter() for _ in range(40)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    parts = [Gradients([(p, ones()) for p in parameters[k : k + 4]]) for k in range(0, 40, 4)]
    for part in parts:
        updates.add(part)
    optimizer.step()
    updates.stepped(optimizer)
    seen, start = [], threading.Barrier(4)

    def read(order: list[int]) -> None:
        start.wait()
        for k in order:
            updates.settle(parameters[k])
            seen.append(parameters[k].tolist() == [-1, -1])

    threads = [threading.Thread(target=read, args=(list(range(40))[:: 1 if k % 2 else -1],)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 160
    assert [part.waits for part in parts] == [1] * 10


def test_dropped_after_a_failure() -> None:
    """Nothing is waited for, and nothing applied."""
    updates, p = pending(), parameter()
    late = Gradients([(p, ones())])
    updates.add(late)
    updates.drop()
    updates.settle(p)
    updates.settle_all()
    assert late.waits == 0 and p.grad is None


def test_one_after_the_other() -> None:
    """A second update before the first one was applied would take its place: a mistake of the caller's."""
    updates, p = pending(), parameter()
    updates.add(Gradients([(p, ones())]))
    with pytest.raises(AssertionError, match="before the last one was applied"):
        updates.add(Gradients([(p, ones())]))


def test_an_error_while_waiting_leaves_it_pending() -> None:
    """The next reader gets the error as well, and no old value."""
    updates, p = pending(), parameter()
    late = Gradients([(p, ones())])

    def fail() -> list[Tensor | None]:
        raise RuntimeError("rank 1 died")

    late.gradients = fail  # type: ignore[method-assign]
    updates.add(late)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1 died"):
            updates.settle(p)
