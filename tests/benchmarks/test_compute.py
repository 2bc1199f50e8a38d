"""Emulated compute: time is spent by sleeping, and gradients come as from the real blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from examples.benchmarks import compute
from examples.benchmarks.compute import BlockTime, set_compute, spread
from examples.benchmarks.data import Zipf, make_batch, words_of
from examples.models.registry import MODELS
from tests.support.example_models import quiet, tiny


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was slept, without sleeping."""
    calls: list[float] = []
    monkeypatch.setattr(compute, "_sleep", calls.append)
    return calls


def made(name: str, **arguments: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, spec = tiny(name, **arguments)
    return quiet(model), make_batch(spec, Zipf(words_of(spec), 1.0), 0, 0, 0)


@pytest.mark.parametrize("name", MODELS)
def test_every_block_takes_its_time_both_ways(name: str, slept: list[float]) -> None:
    """Forward in the order of the blocks, then backward from the last to the first."""
    model, batch = made(name)
    blocks = [block for block, _ in model.blocks()]
    set_compute(model, "emulated", {block: BlockTime(i + 1, -(i + 1)) for i, block in enumerate(blocks)})
    loss = model.training_step(batch, 0)
    assert slept == [i + 1 for i in range(len(blocks))]
    loss.backward()
    backward = slept[len(blocks) :]
    assert sorted(backward) == sorted(-(i + 1) for i in range(len(blocks)))
    assert backward[0] == -len(blocks) and backward[-1] == -1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sparse", [False, True])
def test_every_parameter_has_a_gradient(name: str, sparse: bool, slept: list[float]) -> None:
    """Dense ones of their shape, so that they are exchanged; tables the rows of this batch, as under real compute."""
    model, batch = made(name, sparse=sparse)
    real, _ = made(name, sparse=sparse)
    set_compute(model, "emulated", spread(model, 1.0))
    model.training_step(batch, 0).backward()
    real.training_step(batch, 0).backward()
    for (key, mine), other in zip(model.named_parameters(), real.parameters()):
        assert mine.grad is not None and other.grad is not None, key
        assert mine.grad.shape == other.grad.shape and mine.grad.is_sparse == other.grad.is_sparse, key
        dense = mine.grad.to_dense()
        assert dense.isfinite().all() and dense.any(), key
        if key.removesuffix(".weight") in model.lookups:
            assert set(dense.abs().sum(1).nonzero().flatten().tolist()) <= set(
                other.grad.to_dense().abs().sum(1).nonzero().flatten().tolist()
            )


@pytest.mark.parametrize("name", MODELS)
def test_blocks_hold_every_dense_parameter_once(name: str) -> None:
    """What is in no block would never be emulated; what is in two would take its time twice."""
    model, _ = made(name)
    inside = [id(p) for _, block in model.blocks() for p in block.parameters()]
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    assert sorted(inside) == sorted(id(p) for p in model.parameters() if id(p) not in tables)


def test_gradients_of_a_block_come_before_the_next_block_starts(slept: list[float]) -> None:
    """Dense exchange can start block by block, as in the real model."""
    model, batch = made("transformer")
    blocks = model.blocks()
    set_compute(model, "emulated", spread(model, 1.0))
    events: list[str] = []
    slept_in: list[str] = [name for name, _ in reversed(blocks)]
    for name, block in blocks:
        for p in block.parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    model.training_step(batch, 0).backward()
    assert list(dict.fromkeys(events)) == slept_in
    assert events == sorted(events, key=slept_in.index)


def test_emulated_training_learns_and_repeats(slept: list[float]) -> None:
    """Peers' losses can be compared: they fall, and are the same in every run."""
    curves = []
    for _ in range(2):
        model, batch = made("gnmt", optimizer="sgd", lr=1.0)
        set_compute(model, "emulated", spread(model, 1.0))
        optimizer = model.configure_optimizers()
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model.training_step(batch, 0)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0] == curves[1] == sorted(curves[0], reverse=True) and curves[0][0] > curves[0][-1]


def test_spread_divides_a_step() -> None:
    model, _ = made("bert")
    times = spread(model, 0.9)
    assert sum(t.forward for t in times.values()) == pytest.approx(0.3)
    assert sum(t.backward for t in times.values()) == pytest.approx(0.6)
    assert times["encoder.0"].forward > times["positions"].forward


def test_real_mode_leaves_the_model_alone() -> None:
    model, _ = made("lm")
    set_compute(model, "real", spread(model, 1.0))
    assert all("forward" not in vars(block) for _, block in model.blocks())


def test_wrong_arguments_are_named() -> None:
    model, _ = made("lm")
    with pytest.raises(ValueError, match="'fast'"):
        set_compute(model, "fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names none"):
        set_compute(model, "emulated")
