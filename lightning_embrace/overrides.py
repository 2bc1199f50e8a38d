"""Hooks that are the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning_embrace.namespaces import Namespace


def overridden(
    trainer: Any, module: Any, namespace: Namespace, of_module: Sequence[str], of_callbacks: Sequence[str]
) -> Iterator[str]:
    """Finds hooks of a LightningModule, and of callbacks that are not Lightning's, that are not Lightning's.

    Args:
        trainer: The Trainer, for its callbacks.
        module: The LightningModule.
        namespace: Of Lightning.
        of_module: Hooks to look for in the module.
        of_callbacks: Hooks to look for in callbacks.

    Returns:
        Each in a few words, for people.
    """
    base = namespace.get("LightningModule")
    for name in of_module:
        if getattr(type(module), name) is not getattr(base, name):
            yield f"{type(module).__name__} overrides `{name}`"
    own, given = namespace.name.split(".")[0], namespace.get("callbacks.LambdaCallback")
    for callback in trainer.callbacks:
        if isinstance(callback, given):
            yield from (f"{type(callback).__name__} has `{name}`" for name in of_callbacks if name in vars(callback))
        elif not type(callback).__module__.startswith(f"{own}."):
            for name in of_callbacks:
                if getattr(type(callback), name) is not getattr(namespace.get("Callback"), name):
                    yield f"{type(callback).__name__} overrides `{name}`"
