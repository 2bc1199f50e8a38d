"""``state_dict`` and ``load_state_dict`` of modules whose parameters are in the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class StateDicts:
    """Makes every spilled module's own ``state_dict`` give true numbers, and ``load_state_dict`` take them.

    Args:
        modules: All modules that may have spilled parameters.
        read: Gives a copy of a parameter's numbers in host memory; None where the parameter is not spilled.
        write: Takes the numbers that a parameter has now into the store, and makes it NaN.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        read: Callable[[nn.Parameter], Tensor | None],
        write: Callable[[Sequence[nn.Parameter]], None],
    ) -> None:
        self._read = read
        self._write = write
        self._handles: list[RemovableHandle] = []
        #: gives something in the place of a parameter's numbers, where these are not wanted now
        self.leave: Callable[[nn.Parameter], Tensor | None] | None = None
        for module in modules:
            if any(p is not None for p in module._parameters.values()):
                self._handles += [
                    module._register_state_dict_hook(self._give),
                    module.register_load_state_dict_pre_hook(self._make_room),
                    module.register_load_state_dict_post_hook(self._take),
                ]

    def is_own(self, hook: Any) -> bool:
        """Whether a hook on a module's state dict is one of these."""
        return bool(hook == self._give)

    def __reduce__(self) -> Any:
        """For ``copy.deepcopy`` and ``pickle``, which find this in modules' hooks.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "HydraStrategy: modules cannot be copied or pickled while parameters are away: the copy would be full of"
            " NaN. Take state_dict(), which has true numbers, or copy the model after fit."
        )

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _give(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and prefix + name in state:
                value = (self.leave or self._read)(parameter)
                if value is not None:
                    kept = isinstance(state[prefix + name], nn.Parameter)  # keep_vars
                    state[prefix + name] = nn.Parameter(value, parameter.requires_grad) if kept else value

    def _make_room(self, module: nn.Module, *_: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                value = self._read(parameter)
                if value is not None:
                    parameter.data = value.to(parameter.device)

    def _take(self, module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            self._write([p for p in module._parameters.values() if p is not None])
