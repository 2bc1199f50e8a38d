"""Sharded checkpoints of one process, for tests that need no ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_embrace.checkpoint.optimizer_names import named_state
from lightning_embrace.checkpoint.sharded import Ranks, write_folder

ALONE = Ranks(0, 1, lambda words, _: [words], lambda own: [own])


def checkpoint_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, Any]:
    """What Lightning gives a strategy to write."""
    return {
        "epoch": 1,
        "global_step": 2,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": model.state_dict(),
        "optimizer_states": [named_state(model, [], optimizer)],
        **more,
    }


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model with a sparse table, of which the optimizer has a sparse state."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 3, sparse=True), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for ids in ([1, 4], [4, 5]):
        optimizer.zero_grad()
        model(torch.tensor(ids)).pow(2).sum().backward()
        optimizer.step()
    return model, optimizer


def write(path: Path, **more: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Writes the checkpoint of :func:`trained`."""
    model, optimizer = trained()
    write_folder(ALONE, path, checkpoint_of(model, optimizer, **more), None)
    return model, optimizer


def ordered(value: Any) -> Any:
    """Keys in one order: they are not kept."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value, key=str)}
    return [ordered(v) for v in value] if isinstance(value, list) else value
