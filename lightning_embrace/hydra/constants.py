"""Optimizer states that are made before the first step, without memory for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_embrace.hydra.unit import is_away

_VALUES: dict[Callable[..., Any], float | None] = {
    torch.zeros_like: 0.0,
    torch.ones_like: 1.0,
    torch.full_like: None,
}


class Constants(TorchFunctionMode):
    """Inside, tensors that are filled with one number, in a spilled parameter's shape, are that number expanded.

    Adagrad makes its states where it is constructed: all of them at once, as large as the model.

    Args:
        parameters: Those that will be spilled.
    """

    def __init__(self, parameters: Collection[nn.Parameter]) -> None:
        super().__init__()
        self._parameters = {id(p) for p in parameters}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Intercepts what fills tensors."""
        kwargs = dict(kwargs or {})
        if func not in _VALUES or not args or id(args[0]) not in self._parameters:
            return func(*args, **kwargs)
        like: Tensor = args[0]
        value = _VALUES[func]
        if value is None:
            value = args[1] if len(args) > 1 else kwargs["fill_value"]
        dtype, device = kwargs.get("dtype") or like.dtype, kwargs.get("device") or like.device
        return torch.full((), value, dtype=dtype, device=device).expand(like.shape)


def made_whole(tensor: Tensor) -> None:
    """Gives a tensor of one expanded number memory of its own."""
    if is_away(tensor):
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
