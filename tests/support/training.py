"""Runs a small model under a strategy or in one process and returns everything that must be equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.models import batches, concatenated


class Outcome(NamedTuple):
    """What a run leaves behind."""

    state: dict[str, Tensor]
    optimizer: list[Any]
    losses: list[float]
    sent: dict[str, int]


#: arguments of a Trainer that leaves nothing behind and shows nothing
QUIET = {
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "num_sanity_val_steps": 0,
}


def train(
    make_model: Callable[[], Any],
    data: list[Any],
    strategy: Any,
    devices: int = 1,
    **trainer_arguments: Any,
) -> tuple[Any, Trainer]:
    """Fits a model in fp64 on ready batches."""
    seed_everything(1, verbose=False)
    model = make_model().double()
    trainer = Trainer(
        **{
            "accelerator": "cpu",
            "devices": devices,
            "strategy": strategy,
            **QUIET,
            **trainer_arguments,
        }
    )
    trainer.fit(model, DataLoader(data, batch_size=None, shuffle=False))
    return model, trainer


def outcome(model: Any, trainer: Trainer) -> Outcome:
    """Collects the results of a fit."""
    traffic = getattr(trainer.strategy, "traffic", None)
    return Outcome(
        {k: v.detach().clone() for k, v in model.state_dict().items()},
        [copy.deepcopy(o.state_dict()["state"]) for o in trainer.optimizers],
        list(model.losses),
        dict(traffic.sent) if traffic is not None else {},
    )


def on_rank(
    rank_strategy: Callable[[], Any], make_model: Callable[[], Any], steps: int, world_size: int, **arguments: Any
) -> Outcome:
    """Runs in a worker: trains on this rank's batches."""
    import os

    rank = int(os.environ["LOCAL_RANK"])
    data = [step[rank] for step in batches(steps, world_size)]
    return outcome(*train(make_model, data, rank_strategy(), world_size, **arguments))


def reference(make_model: Callable[[], Any], steps: int, world_size: int, **arguments: Any) -> Outcome:
    """One process on the concatenated batches."""
    data = [concatenated(step) for step in batches(steps, world_size)]
    return outcome(*train(make_model, data, "auto", **arguments))


def assert_equal(ours: Outcome, plain: Outcome, tolerance: float = 1e-10) -> None:
    """Parameters, optimizer state and losses are equal."""
    assert ours.state.keys() == plain.state.keys()
    for key, value in plain.state.items():
        torch.testing.assert_close(ours.state[key], value, rtol=0, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}")
    assert len(ours.losses) == len(plain.losses) > 0
    losses = [torch.tensor(o.losses, dtype=torch.float64) for o in (ours, plain)]
    torch.testing.assert_close(*losses, rtol=0, atol=tolerance)
    assert len(ours.optimizer) == len(plain.optimizer)
    for mine, other in zip(ours.optimizer, plain.optimizer):
        assert mine.keys() == other.keys()
        for number in other:
            assert mine[number].keys() == other[number].keys()
            for key, value in other[number].items():
                if isinstance(value, Tensor):
                    left = mine[number][key]
                    left, value = (t.to_dense() if t.is_sparse else t for t in (left, value))
                    torch.testing.assert_close(left, value, rtol=0, atol=tolerance)
                else:
                    assert mine[number][key] == value
