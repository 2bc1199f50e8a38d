"""Trains a GPT-like model under ``hydra``, or plainly, in a fresh process, and says what it took.

::

    python examples/benchmarks/spilled_job.py '{"dim": 512, "layers": 8, "device": 60000000, "disk": "/tmp"}'

prints the result as JSON. Other scripts call :func:`result_of`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.benchmarks.own_ranks import TRAINER, status  # noqa: E402

#: a process that has loaded torch and Lightning holds about so much
BESIDE = 512 << 20


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        dim: Of the model, with the next four (:class:`~examples.benchmarks.spilled_gpt.SpilledGPT`).
        layers: Blocks.
        vocabulary: V.
        length: Tokens of a sequence.
        optimizer: ``"sgd"`` or ``"adamw"``.
        sequences: In a batch.
        steps: How many. The first one is measured by the strategy, and the second one begins under a new plan.
        strategy: ``"hydra"``, ``"auto"``, or ``"deepspeed"``, which runs in an environment of its own.
        device: Bytes of the device's budget.
        host: Bytes of the host's budget.
        disk: A folder, or empty.
        prefetch: The strategy's.
        accelerator: ``"cpu"`` or ``"gpu"``.
        brief: The process ends with the last step: the model does not become an ordinary one again.
        limited: The process may have no more data than both budgets and :data:`BESIDE` (RLIMIT_DATA), beside addresses
            that had no memory before there was a model.
    """

    dim: int = 512
    layers: int = 8
    vocabulary: int = 1000
    length: int = 64
    optimizer: str = "sgd"
    sequences: int = 2
    steps: int = 4
    strategy: str = "hydra"
    device: int = 1 << 40
    host: int = 1 << 40
    disk: str = ""
    prefetch: bool = True
    accelerator: str = "cpu"
    brief: bool = False
    limited: bool = False

    @property
    def allowed(self) -> int:
        """Bytes that the process may have."""
        return self.device + self.host + BESIDE


class JobError(RuntimeError):
    """A job's process has failed."""


def result_of(job: Job, timeout: float = 3600.0, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs a job in a process of its own.

    Args:
        job: The job.
        timeout: Seconds.
        environment: More variables.

    Returns:
        What :func:`run` returns.

    Raises:
        JobError: It has failed; the message ends with the last lines of its stderr.
    """
    python = ROOT / ".venvs" / "deepspeed" / "bin" / "python" if job.strategy == "deepspeed" else sys.executable
    command = [str(python), __file__, json.dumps(asdict(job))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(environment or {})}
    )
    if done.returncode != 0:
        raise JobError(f"{job}: exit status {done.returncode}\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run(job: Job) -> dict[str, Any]:
    """Trains in this process.

    Returns:
        Seconds and losses by step; ``moved``: bytes of a step in the steady state by ``"disk read"`` and so on, as the
        store has counted them, and by ``"blocks read"`` and ``"blocks written"``, as the kernel has; ``plan``: as the
        plan foretells them; ``transfers``: seconds of those steps in which shards were moved, and in which the model
        waited for it; ``built`` and ``whole``: seconds until the first step, and until all is over; ``peak``: VmHWM by
        stage; and how shards were met (``shards``).
    """
    if job.strategy == "deepspeed":
        from examples.benchmarks import spilled_deepspeed

        return spilled_deepspeed.run(job)
    import torch
    from lightning.pytorch import Trainer, seed_everything
    from torch.utils.data import DataLoader

    from examples.benchmarks.spilled_gpt import SpilledGPT, batches, parameters_of
    from examples.benchmarks.spilled_watch import Watch

    if job.limited:
        _limit(job.allowed)
    began = time.perf_counter()
    seed_everything(0, verbose=False)
    model = SpilledGPT(job.dim, job.layers, job.vocabulary, job.length, job.optimizer)
    watch = Watch(job.steps, began)

    def result() -> dict[str, Any]:
        return {
            "parameters": parameters_of(job.dim, job.layers, job.vocabulary, job.length),
            "threads": torch.get_num_threads(),
            "losses": model.losses,
            "gpu": torch.cuda.max_memory_allocated() if job.accelerator == "gpu" else 0,
            **watch.found,
            "whole": time.perf_counter() - began,
            "peak": {**watch.peak, "afterwards": status("VmHWM")},
        }

    if job.brief:
        watch.at_end = lambda: _end_with(result())
    arguments = {**TRAINER, "accelerator": job.accelerator}
    trainer = Trainer(**arguments, max_epochs=1, strategy=_strategy(job), callbacks=[watch])
    data: Any = batches(job.steps, job.sequences, job.length, job.vocabulary)
    trainer.fit(model, DataLoader(data, batch_size=None))
    return result()


def _limit(nbytes: int) -> None:
    """Lets the process have no more data, beside what has an address but no memory: stacks of idle threads, mostly."""
    import resource

    most = nbytes + status("VmData") - status("RssAnon")
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _end_with(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)
    os._exit(0)


def _strategy(job: Job) -> Any:
    if job.strategy != "hydra":
        return job.strategy
    from lightning_embrace import HydraStrategy

    return HydraStrategy(device_memory=job.device, host_memory=job.host, disk=job.disk or None, prefetch=job.prefetch)


if __name__ == "__main__":
    print(json.dumps(run(Job(**json.loads(sys.argv[1])))))
