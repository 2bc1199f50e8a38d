"""What a checkpoint holds, on its way into the model and the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_embrace.checkpoint.mapped import MappedFile
from lightning_embrace.checkpoint.sharded import read_rest
from lightning_embrace.hydra.layout import copy_all
from lightning_embrace.hydra.unit import is_away


@contextmanager
def copied_from(file: MappedFile | None, model: nn.Module, state_dict: Mapping[str, Any]) -> Iterator[None]:
    """Inside, what a module has loaded leaves memory before the next one loads.

    Args:
        file: Where it is mapped from, if it is.
        model: The model.
        state_dict: What it loads.
    """
    if file is None:
        yield
        return

    def loaded(names: Sequence[str], *_: Any) -> None:
        for name in names:
            if isinstance(value := state_dict.get(name), Tensor):
                file.let_go(value)

    handles = [
        module.register_load_state_dict_post_hook(partial(loaded, [f"{prefix}{name}" for name in module._parameters]))
        for prefix, module in ((f"{name}." if name else "", module) for name, module in model.named_modules())
        if module._parameters
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
