"""Peers that are a Lightning strategy: ``embrace``, ``ddp`` with dense and sparse gradients, and no communication."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from examples.benchmarks import kernel
from examples.benchmarks.counters import LINK_VARIABLE
from examples.benchmarks.job import Job
from examples.benchmarks.meter import Meter
from examples.benchmarks.peers import PEERS
from examples.benchmarks.peers.profiled import StepProfiler
from examples.benchmarks.peers.watch import Watch
from examples.benchmarks.work import Work, rank


class _Measure(Callback):
    """Marks the step boundaries. Reads the loss, and neither weights nor gradients: updates may still be on the way."""

    def __init__(self, meter: Meter, watch: Watch | None, profiler: StepProfiler | None) -> None:
        self._meter, self._watch, self._profiler = meter, watch, profiler

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 0:
            if self._watch is not None:
                self._watch.begin()
            self._meter.boundary()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self._meter.loss(float(outputs["loss"]))
        if self._watch is not None:
            self._meter.count(**self._watch.step())
        if self._profiler is not None:
            self._profiler.step()
        self._meter.boundary()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if self._watch is not None:
            self._watch.end()
        if self._profiler is not None:
            self._profiler.end()


def train(job: Job) -> dict[str, Any]:
    """Fits the job's model on this rank's batches under the peer's strategy."""
    work = Work(job)
    meter = Meter(job.warmup)
    together = job.peer != "none"
    strategy = _strategy(job) if together else "auto"
    watch = Watch(strategy, job.warmup) if PEERS[job.peer].schedule and job.ranks > 1 else None
    profiler = StepProfiler(job.profile, job.warmup) if job.profile and rank() == 0 else None
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=job.ranks if together else 1,
        strategy=strategy,
        plugins=[] if together else _alone(),
        max_steps=work.steps,
        callbacks=[_Measure(meter, watch, profiler)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(work.model, DataLoader(work.batches, batch_size=None))
    result = {**meter.result(), "blocks": work.blocks}
    if watch is not None:
        result |= watch.result()
    return result


def _strategy(job: Job) -> Any:
    if job.peer.startswith("ddp"):
        from lightning.pytorch.strategies import DDPStrategy

        # Lightning's default; the models use every parameter in every step, and start equal by their seed
        return DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True, init_sync=False)
    from lightning_embrace import EmbRaceStrategy

    schedule: Any = PEERS[job.peer].schedule
    wire: Any = job.wire_dtype or None
    return EmbRaceStrategy(
        process_group_backend="gloo",
        schedule=schedule,
        wire_dtype=wire,
        trace=job.trace or None,
        communication="horovod" if _over_horovod(job) else "torch",
    )


def _over_horovod(job: Job) -> bool:
    if job.peer != "embrace-horovod":
        return False
    if LINK_VARIABLE in os.environ:  # see `horovod.py`: Horovod takes the address that the host name has
        kernel.take_host_name(kernel.address_towards(os.environ["MASTER_ADDR"]))
    return True


def _alone() -> list[Any]:
    """Each rank trains by itself, whatever the launcher's variables say."""
    from lightning.pytorch.plugins.environments import LightningEnvironment

    return [LightningEnvironment()]
