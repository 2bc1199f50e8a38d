"""Whether a shard may be stepped in backward: only where nobody could see its gradients, or change them, before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from lightning_embrace.namespaces import Namespace
from lightning_embrace.overrides import overridden

#: hooks that see all gradients, or decide what becomes of them
_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_MODULE_HOOKS = (
    *_HOOKS,
    "backward",
    "configure_gradient_clipping",
    "clip_gradients",
    "optimizer_step",
    "optimizer_zero_grad",
)


def why_second_pass(
    trainer: Any, module: Any, precision_plugin: Any, optimizer: Optimizer, namespace: Namespace
) -> str | None:
    """Looks for what needs all gradients before any parameter moves.

    Args:
        trainer: The Trainer.
        module: The LightningModule.
        precision_plugin: The strategy's.
        optimizer: The optimizer.
        namespace: Of Lightning.

    Returns:
        None where shards may be stepped in backward, else the reason in a few words, for the plan.
    """
    return next(_reasons(trainer, module, precision_plugin, optimizer, namespace), None)


def _reasons(
    trainer: Any, module: Any, precision_plugin: Any, optimizer: Optimizer, namespace: Namespace
) -> Iterator[str]:
    if not module.automatic_optimization:
        yield "optimization is manual"
    if getattr(precision_plugin, "scaler", None) is not None:
        yield "the gradient scaler decides whether a step counts"
    if trainer.gradient_clip_val:
        yield "gradients are clipped"
    if trainer.accumulate_grad_batches != 1:
        yield "gradients are accumulated"
    scheduling = namespace.get("callbacks.GradientAccumulationScheduler")
    if any(isinstance(callback, scheduling) for callback in trainer.callbacks):
        yield "gradients are accumulated"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        yield f"{type(optimizer).__name__} has step hooks"
    yield from overridden(trainer, module, namespace, _MODULE_HOOKS, _HOOKS)
