"""Optimizer states of a checkpoint, on their way into the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_embrace.checkpoint.sharded import read_rest
from lightning_embrace.hydra.layout import copy_all
from lightning_embrace.hydra.unit import is_away


def read_into(views: Mapping[int, Tensor], values: Mapping[int, Tensor]) -> None:
    """Fills memory with tensors of a checkpoint.

    Args:
        views: Where they go.
        values: By the same keys the tensors, which may still be in a folder.
    """
    read = read_rest(dict(values), lambda path, *_: views[path[0]])
    rest = [key for key, value in read.items() if value is not views[key]]
    copy_all([read[key] for key in rest], [views[key] for key in rest])


def check_kept(optimizer: Optimizer, states: Mapping[Any, Any], numbers: Sequence[int]) -> None:
    """Refuses states that nobody has planned for: of an optimizer with other settings.

    Args:
        optimizer: The one that loads them.
        states: By the parameters' numbers; what was planned for is away.
        numbers: Of parameters that are in the store.

    Raises:
        ValueError: There are such.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number in numbers:
        state = states.get(number)
        for key, value in state.items() if isinstance(state, Mapping) else ():
            large = isinstance(value, Tensor) and value.numel() > 1 and value.shape == parameters[number].shape
            if large and not is_away(value):
                raise ValueError(
                    f"HydraStrategy: the checkpoint's {type(optimizer).__name__} keeps {key!r} for each parameter, and"
                    " the one that configure_optimizers returned does not: it has other settings (momentum, amsgrad,"
                    " ...), by which memory was planned. Give it those of the run that wrote the checkpoint."
                )
