"""Peers that are a Lightning strategy: ``embrace``, ``ddp`` with dense and sparse gradients, and no communication."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from examples.benchmarks.job import Job
from examples.benchmarks.meter import Meter
from examples.benchmarks.work import Work


class _Measure(Callback):
    """Marks the step boundaries."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 0:
            self._meter.boundary()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self._meter.loss(float(outputs["loss"]))
        self._meter.boundary()


def train(job: Job) -> dict[str, Any]:
    """Fits the job's model on this rank's batches under the peer's strategy."""
    work = Work(job)
    meter = Meter(job.warmup)
    together = job.peer != "none"
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=job.ranks if together else 1,
        strategy=_strategy(job) if together else "auto",
        plugins=[] if together else _alone(),
        max_steps=job.warmup + job.steps,
        callbacks=[_Measure(meter)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(work.model, DataLoader(work.batches, batch_size=None))
    result = meter.result()
    traffic = getattr(trainer.strategy, "traffic", None)
    if traffic is not None:
        result["counted"] = {"sent": dict(traffic.sent), "received": dict(traffic.received), "steps": traffic.steps}
    return result


def _strategy(job: Job) -> Any:
    if job.peer.startswith("ddp"):
        from lightning.pytorch.strategies import DDPStrategy

        # Lightning's default; the models use every parameter in every step
        return DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    from lightning_embrace import EmbRaceStrategy

    return EmbRaceStrategy(process_group_backend="gloo", wire_dtype=job.wire_dtype or None)


def _alone() -> list[Any]:
    """Each rank trains by itself, whatever the launcher's variables say."""
    from lightning.pytorch.plugins.environments import LightningEnvironment

    return [LightningEnvironment()]
