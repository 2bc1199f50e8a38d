"""Lightning's own record of how far a fit has come: what is read of it, and changed in it, when a run goes on."""

from __future__ import annotations

from typing import Any


def loader_states(checkpoint: dict[str, Any]) -> list[Any] | None:
    """What a checkpoint holds of the training loaders, one entry per stateful loader; None: there is none."""
    states: list[Any] | None = _fit_loop(checkpoint).get("state_dict", {}).get("combined_loader")
    return states


def put_loader_states(checkpoint: dict[str, Any], states: list[Any] | None) -> None:
    """Lets the training loaders go on from other states; with None they begin their epoch."""
    kept = _fit_loop(checkpoint).setdefault("state_dict", {})
    kept.pop("combined_loader", None)
    if states is not None:
        kept["combined_loader"] = states


def rewind(checkpoint: dict[str, Any], batches: int) -> None:
    """Takes back some batches of the epoch, none of which has ended in an optimizer step.

    Args:
        checkpoint: What Lightning is about to write; changed.
        batches: How many.
    """
    loop = _fit_loop(checkpoint)
    progress = loop["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        for name in counts:
            counts[name] -= batches
    if progress["total"]["completed"] < progress["total"]["processed"]:
        # whoever goes on from `on_train_batch_end` counts that batch' step; the one that it is now has been counted
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def epoch_of(fit_loop: Any) -> int:
    """The epoch whose batches a fit that goes on trains on first. Call before the fit begins."""
    return int(fit_loop.epoch_progress.current.processed) + int(is_after_last_batch(fit_loop))


def is_after_last_batch(fit_loop: Any) -> bool:
    """Saved in ``on_train_batch_end`` of an epoch's last batch: Lightning goes on with the next epoch.

    It trains that on the iterator that it has made before ``on_train_start``.
    """
    batches = fit_loop.epoch_loop.batch_progress
    return bool(fit_loop.restarting and batches.is_last_batch and batches.total.completed < batches.total.processed)


def begin_next_epoch(checkpoint: dict[str, Any]) -> None:
    """Forgets the loaders' states if they are those of the end of an epoch, and the next one is to be trained on.

    So does Lightning with a checkpoint that was written after the epoch's end.
    """
    batches = _fit_loop(checkpoint)["epoch_loop.batch_progress"]
    if batches["is_last_batch"] and batches["total"]["completed"] < batches["total"]["processed"]:
        put_loader_states(checkpoint, None)


def is_after_validation(fit_loop: Any) -> bool:
    """Saved in the validation at the end of an epoch: Lightning ends that epoch, and iterates anew for the next."""
    batches = fit_loop.epoch_loop.batch_progress
    return bool(fit_loop.restarting and batches.is_last_batch and batches.total.completed == batches.total.processed)


def iterates_again(fit_loop: Any) -> bool:
    """Whether the iterators that were made before ``on_train_start`` are not those of an epoch that begins.

    The run that was saved had made its iterator before; or it makes the next epoch's after what it does at the end of
    an epoch. What has been drawn in making one belongs to no moment of that run.
    """
    # before 2.5.3 Lightning makes another one when an epoch begins
    return bool(fit_loop.restarting) or not hasattr(fit_loop, "is_resuming")


def _fit_loop(checkpoint: dict[str, Any]) -> dict[str, Any]:
    loop: dict[str, Any] = checkpoint["loops"]["fit_loop"]
    return loop
