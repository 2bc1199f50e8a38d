"""What Lightning says about a fit: which loaders train, and whether the next batch can be known."""

from __future__ import annotations

import inspect
from typing import Any

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOADERS = "_dataloader()"


class LoaderKind:
    """Tells training loaders from the others, which `Strategy.process_dataloader` gets alike.

    Lightning calls ``strategy.barrier("train_dataloader()")`` (``val_…``, ``test_…``, ``predict_…``) right before it
    processes loaders of a kind. The stage of the Trainer alone is not enough: a hook of the sanity check may ask for
    ``trainer.estimated_stepping_batches``, which sets the training loaders up.
    """

    def __init__(self) -> None:
        self._last: str | None = None

    def hear(self, barrier: str | None) -> None:
        """Call in ``barrier`` with its name."""
        if barrier is not None and barrier.endswith(_LOADERS):
            self._last = barrier.removesuffix(_LOADERS)

    def is_training(self, trainer: Any) -> bool:
        """Whether the loader that is processed now is trained on in this fit."""
        if trainer.state.fn != "fit":
            return False
        return bool(trainer.training) if self._last is None else self._last == "train"


def fetches_itself(trainer: Any) -> bool:
    """Whether ``training_step`` gets the loader's iterator: batches are fetched inside the step."""
    return "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters


def reason_off(trainer: Any, learns: bool) -> str | None:
    """Why the next batch's ids cannot be known in this fit, for the printed plan.

    Args:
        trainer: Lightning's Trainer.
        learns: ``lookahead="auto"``; a user's function knows what a transfer hook makes of a batch.

    Returns:
        The reason, None: there is none.
    """
    if fetches_itself(trainer):
        return "`training_step(dataloader_iter)` fetches its batches itself"
    hooked = [
        f"{type(owner).__name__}.{name}"
        for owner in (trainer.lightning_module, trainer.datamodule)
        for name in _TRANSFER_HOOKS
        if owner is not None and _is_overridden(owner, name)
    ]
    if learns and hooked:
        return f"`{hooked[0]}` may change the ids of a batch; lookahead=<function> can tell them"
    return None


def _is_overridden(owner: Any, name: str) -> bool:
    # Lightning's own are in `core.hooks`, under both of its names
    return not str(getattr(getattr(owner, name), "__module__", "")).endswith(".core.hooks")
