"""Notices gradients that no synchronised backward pass has brought: ``loss.backward()`` in manual optimization."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class GradientGuard:
    """Knows which parameters' gradients are this rank's alone.

    ddp synchronises in any backward pass; here only those that Lightning starts are. An optimizer that steps on others
    would let the ranks drift apart without a word.

    Args:
        parameters: Parameters whose ranks must agree, by name.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._name_of = {id(p): name for name, p in parameters.items()}
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._alone: set[str] = set()
        self._expected = False

    def watch(self) -> None:
        """Call before a step: parameters may have been thawed since."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and name not in self._hooks:
                self._hooks[name] = parameter.register_post_accumulate_grad_hook(self._came)

    def expect(self) -> None:
        """A backward pass begins that will be synchronised, now or with a later one."""
        self._expected = True

    def arrived(self, synchronised: bool) -> None:
        """The backward pass is over."""
        self._expected = False
        if synchronised:
            self._alone.clear()

    def alone(self, optimizer: Optimizer) -> list[str]:
        """Names of an optimizer's parameters whose gradients were not synchronised."""
        mine = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return [self._name_of[id(p)] for p in mine if self._name_of.get(id(p)) in self._alone]

    def remove_hooks(self) -> None:
        """Leaves the parameters as they were found."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _came(self, parameter: Tensor) -> None:
        if not self._expected:
            self._alone.add(self._name_of[id(parameter)])
