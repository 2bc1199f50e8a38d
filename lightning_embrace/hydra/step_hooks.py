"""Hooks of a user's optimizer: called once for each of its steps, of however many parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def before_step(optimizer: Optimizer, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Calls the hooks that come before a step.

    Args:
        optimizer: Whose.
        kwargs: Arguments of the step.

    Returns:
        The arguments that hooks have made of them.
    """
    for hook in list(optimizer._optimizer_step_pre_hooks.values()):
        changed = hook(optimizer, (optimizer,), kwargs)
        if changed is not None:
            _, kwargs = changed
    return kwargs


def after_step(optimizer: Optimizer, kwargs: dict[str, Any]) -> None:
    """Calls the hooks that come after a step."""
    for hook in list(optimizer._optimizer_step_post_hooks.values()):
        hook(optimizer, (optimizer,), kwargs)


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Inside, steps are parts of a step: no hook is called."""
    attributes = vars(optimizer)
    hidden = {name: attributes[name] for name in _HOOKS}
    attributes.update({name: OrderedDict() for name in _HOOKS})
    try:
        yield
    finally:
        attributes.update(hidden)
