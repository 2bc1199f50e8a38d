"""A model whose steps follow a script of look-ups that differs from rank to rank, and its reference in one process.

The reference averages the losses of all ranks' scripts, each computed by itself: that is what N-rank ddp computes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_embrace import EmbRaceStrategy
from tests.support.models import Small
from tests.support.training import Outcome, assert_equal, outcome, train

#: shards whatever the size
ALL = functools.partial(EmbRaceStrategy, tables=["*"])
Script = list[dict[str, Any]]


def look(table: str, ids: Any, *offsets: Any, **more: Any) -> dict[str, Any]:
    """One look-up of a script.

    Args:
        table: Name of the module.
        ids: Ids as nested lists or a tensor.
        offsets: Second argument of the module, if any.
        more: ``weights`` (per sample), ``grad=False`` (under no_grad), ``used=False`` (kept out of the loss).

    Returns:
        What :class:`Scripted` looks up.
    """
    ids = ids if isinstance(ids, Tensor) else torch.tensor(ids, dtype=torch.int64)
    if offsets:
        more["offsets"] = torch.as_tensor(offsets[0], dtype=ids.dtype)
    if "weights" in more:
        more["weights"] = torch.as_tensor(more["weights"], dtype=torch.float64)
    return {"table": table, "ids": ids, **more}


class Scripted(Small):
    """Tables, a trained scale, and a loss that sums over the look-ups of a script.

    Args:
        optimizer: One of ``tests.support.models.OPTIMIZERS``.
        tables: By name, a function that makes the module.
    """

    def __init__(self, optimizer: str, **tables: Callable[[], nn.Module]) -> None:
        super().__init__(optimizer)
        for name, make in tables.items():
            self.add_module(name, make())
        for module in self.modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.padding_idx is not None:
                with torch.no_grad():  # torch fills it with zeros; what is looked up must still be right if it is not
                    module.weight[module.padding_idx] = 0.75
        self.scale = None if optimizer == "sparseadam" else nn.Parameter(torch.tensor(0.9))

    def loss(self, script: Script) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for number, call in enumerate(script):
            with torch.set_grad_enabled(call.get("grad", True)):
                values = self.look_up(call).double()
            factor = 1 + torch.arange(values.numel(), dtype=torch.float64).view(values.shape) / 7
            term = (torch.tanh(values) * factor).sum() + (values**2).sum() * 0.01 * (number + 1)
            if call.get("used", True):
                total = total + term
        # a loss always has something to differentiate, as torch wants it
        return total * self.scale if self.scale is not None else total + torch.zeros((), requires_grad=True)

    def look_up(self, call: dict[str, Any]) -> Tensor:
        arguments = [call["offsets"]] if "offsets" in call else []
        more = {"per_sample_weights": call["weights"]} if "weights" in call else {}
        return self.get_submodule(call["table"])(call["ids"], *arguments, **more)

    def training_step(self, scripts: list[Script], batch_idx: int) -> Tensor:
        loss = torch.stack([self.loss(script) for script in scripts]).mean()
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")))
        return loss


def on_rank(
    make_model: Callable[[], Any], data: Sequence[Sequence[Any]], strategy: Callable[[], Any], **arguments: Any
) -> Outcome:
    """Runs in a worker: trains on this rank's part of every step."""
    rank, world_size = int(os.environ["LOCAL_RANK"]), len(data[0])
    return outcome(*train(make_model, [[step[rank]] for step in data], strategy(), world_size, **arguments))


def one_process(make_model: Callable[[], Any], data: Sequence[Sequence[Any]], **arguments: Any) -> Outcome:
    """All ranks' parts of every step in this process."""
    return outcome(*train(make_model, [list(step) for step in data], "auto", **arguments))


def check(
    ranks: Any,
    make_model: Callable[[], Any],
    data: Sequence[Sequence[Any]],
    tolerance: float = 1e-10,
    strategy: Callable[[], Any] = ALL,
    **arguments: Any,
) -> tuple[list[Outcome], Outcome]:
    """Trains on ``len(data[0])`` ranks and in one process and compares everything.

    Returns:
        The outcomes of the ranks, and the reference.
    """
    plain = one_process(make_model, data, **arguments)
    ours = ranks(len(data[0])).run(on_rank, make_model, data, strategy, timeout=40.0, **arguments)
    for one in ours:
        assert_equal(one, plain, tolerance)
    return ours, plain
