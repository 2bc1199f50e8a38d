"""Whether updates may be applied after their step: only where nobody could see a gradient or a weight before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_embrace.namespaces import Namespace
from lightning_embrace.overrides import overridden
from lightning_embrace.schedule.gate import is_compiled, kept_elsewhere

#: hooks that are given the optimizer, and could read gradients or weights through it
_HOOKS = ("on_before_optimizer_step", "on_before_zero_grad", "optimizer_step", "optimizer_zero_grad")
#: the same, of a LightningModule alone
_MODULE_HOOKS = (*_HOOKS, "configure_gradient_clipping", "clip_gradients", "backward")


def why_not_relaxed(trainer: Any, module: Any, precision_plugin: Any, namespace: Namespace) -> str | None:
    """Looks for whatever sees gradients or weights past the modules' parameters.

    Reading them through the model (``self.weight``, ``parameters()``, a state dict) is seen, and needs no caution.

    Args:
        trainer: The Trainer.
        module: The LightningModule.
        precision_plugin: The strategy's.
        namespace: Of Lightning.

    Returns:
        None where updates may be late, else the reason in a few words, for the plan.
    """
    return next(_reasons(trainer, module, precision_plugin, namespace), None)


def why_disturbed(trainer: Any, module: Any, namespace: Namespace) -> str | None:
    """Looks for whatever may give gradients to rows that a step has not looked up, or keep those of earlier steps.

    Args:
        trainer: The Trainer.
        module: The LightningModule.
        namespace: Of Lightning.

    Returns:
        None where a step moves no rows but those it looked up (and those that the optimizer moves anyway).
    """
    return next(overridden(trainer, module, namespace, _MODULE_HOOKS, _HOOKS[:2]), None)


def _reasons(trainer: Any, module: Any, precision_plugin: Any, namespace: Namespace) -> Iterator[str]:
    if not module.automatic_optimization:
        yield "optimization is manual"
    if getattr(precision_plugin, "scaler", None) is not None:
        yield "the gradient scaler decides whether a step counts"
    if trainer.gradient_clip_val:
        yield "gradients are clipped"
    yield from overridden(trainer, module, namespace, _MODULE_HOOKS, _HOOKS[:2])
    mine = {id(p) for p in module.parameters()}
    for name, part in module.named_modules():
        if is_compiled(part):
            yield f"{name or 'the model'} is compiled, and reads its parameters unseen"
        if not isinstance(part, nn.RNNBase):  # reads its list in forward, and that is seen
            yield from _references(part, f"{type(module).__name__}{'.' * bool(name)}{name}", mine)
    for callback in trainer.callbacks:
        yield from _references(callback, type(callback).__name__, mine)


def _references(owner: object, name: str, parameters: set[int]) -> Iterator[str]:
    """Parameters that are read without their modules, whenever somebody likes to."""
    for attribute, kept in kept_elsewhere(owner).items():
        if any(id(p) in parameters for p in kept):
            yield f"`{name}.{attribute}` holds parameters past their modules"
