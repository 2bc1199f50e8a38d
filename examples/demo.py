"""The demo of the language model: train it, then count what each way of training puts on the wire."""

import logging
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from typing_extensions import override

from examples.counting_ddp import CountingDDPStrategy

RANKS = 2
# Every DDP step costs the same bytes, but its first buckets are cut differently.
DDP_STEPS = 5


class EpochLines(Callback):
    """Prints one line per epoch on rank 0."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        # The name says which loss it is: that of a sampled softmax is not the text's.
        name = next(key for key in metrics if key.startswith("train_") and key.endswith("loss_epoch"))
        pl_module.print(
            f"epoch {trainer.current_epoch + 1:2d} | step {trainer.global_step:5d}"
            f" | {name.removesuffix('_epoch')} {metrics[name]:6.3f}"
            f" | val_loss {metrics['val_loss']:6.3f} | val_ppl {metrics['val_ppl']:8.1f}"
            f" | {time.monotonic() - self._start:4.0f} s"
        )


def _trainer(strategy: Any, **kwargs: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **kwargs,
    )


def _bytes_per_step(trainer: Trainer) -> float:
    """What rank 0 has sent in a training step, by the strategy's own count."""
    traffic: Any = trainer.strategy.traffic  # type: ignore[attr-defined]
    return float(traffic.total_sent() / traffic.steps)


def run_demo(build: Callable[[], tuple[LightningModule, LightningDataModule]], strategy: str, max_epochs: int) -> None:
    """Train under ``strategy`` and compare its traffic with that of ``ddp``.

    Both trainings run in the same processes: the first starts them, the second finds them started.

    Args:
        build: Makes the model and its data, the same each time.
        strategy: Name of the strategy to show; ``"ddp"`` compares ``ddp`` with itself.
        max_epochs: Length of the first training.
    """
    # Two trainings would print what Lightning says of the machine twice, from every process.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")

    model, data = build()
    shown = _trainer(
        CountingDDPStrategy() if strategy == "ddp" else strategy,
        max_epochs=max_epochs,
        callbacks=[EpochLines()],
        # A bar redraws itself, which makes a log file unreadable.
        enable_progress_bar=sys.stdout.isatty(),
    )
    shown.fit(model, datamodule=data)

    model, data = build()
    usual = _trainer(CountingDDPStrategy(), max_steps=DDP_STEPS, limit_val_batches=0, enable_progress_bar=False)
    usual.fit(model, datamodule=data)

    if shown.is_global_zero:
        here, there = _bytes_per_step(shown), _bytes_per_step(usual)
        print(
            f"bytes sent per step by one of {RANKS} ranks, counted:"
            f" {strategy} {here:,.0f}, ddp {there:,.0f}, ratio {there / here:.1f}"
        )
