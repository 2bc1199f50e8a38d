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
        limited: The process may have no more data than both budgets and :data:`BESIDE` (RLIMIT_DATA).
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


def block_io() -> dict[str, int]:
    """Bytes that this process has had block devices read and write so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read": int(fields["read_bytes"]), "written": int(fields["write_bytes"])}


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
    if job.limited:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (job.allowed, job.allowed))
    import torch
    from lightning.pytorch import Trainer, seed_everything
    from torch.utils.data import DataLoader

    from examples.benchmarks.spilled_gpt import SpilledGPT, batches, parameters_of

    began = time.perf_counter()
    seed_everything(0, verbose=False)
    model = SpilledGPT(job.dim, job.layers, job.vocabulary, job.length, job.optimizer)
    watch = _watch(job, began)

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

    watch.result = result
    arguments = {**TRAINER, "accelerator": job.accelerator}
    trainer = Trainer(**arguments, max_epochs=1, strategy=_strategy(job), callbacks=[watch])
    data: Any = batches(job.steps, job.sequences, job.length, job.vocabulary)
    trainer.fit(model, DataLoader(data, batch_size=None))
    return result()


def _strategy(job: Job) -> Any:
    if job.strategy != "hydra":
        return job.strategy
    from lightning_embrace import HydraStrategy

    return HydraStrategy(device_memory=job.device, host_memory=job.host, disk=job.disk or None, prefetch=job.prefetch)


def _watch(job: Job, began: float) -> Any:
    """A callback, made here: Lightning is imported only where a job runs."""
    from lightning.pytorch import Callback

    class Watch(Callback):
        """Notes times and bytes at the beginning and end of steps."""

        def __init__(self) -> None:
            self.found: dict[str, Any] = {"seconds": []}
            self.peak: dict[str, int] = {}
            self.result: Any = None
            self._before: dict[str, float] = {}

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.peak["built"] = status("VmHWM")
            self.found["built"] = time.perf_counter() - began
            self._began = time.perf_counter()

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self._before, self._transfers = self._bytes(trainer), self._moving(trainer)
            self._began = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.found["seconds"].append(time.perf_counter() - self._began)
            if batch_idx == job.steps - 1 and self._before:
                self.found["transfers"] = {
                    name: seconds - self._transfers[name] for name, seconds in self._moving(trainer).items()
                }
                after = self._bytes(trainer)
                self.found["moved"] = {
                    name: (value - self._before.get(name, 0)) / (job.steps - 2) for name, value in after.items()
                }

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.peak["trained"] = status("VmHWM")
            planned = getattr(trainer.strategy, "planned", None)
            if planned is None:
                return
            from lightning_embrace.hydra.traffic import traffic

            self.found["plan"] = dict(traffic(planned.units, planned.plan, planned.budget.spilled_gradients))
            self.found["places"] = {place: planned.plan.places.count(place) for place in ("device", "host", "disk")}
            self.found["slots"] = [planned.plan.slots, planned.plan.slot_bytes]
            session = trainer.strategy._session
            self.found["accounts"] = {tier: ledger.peak for tier, ledger in session.ledgers.items()}
            if planned.plan.shards:
                self.found["shards"] = dict(session.transfer.counts)
            if job.brief:
                print(json.dumps(self.result()), flush=True)
                os._exit(0)

        @staticmethod
        def _moving(trainer: Any) -> dict[str, float]:
            session = getattr(trainer.strategy, "_session", None)
            return dict(session.transfer.seconds) if session is not None and session.shards else {}

        @staticmethod
        def _bytes(trainer: Any) -> dict[str, float]:
            """Counted so far, when all that was to be written is."""
            session = getattr(trainer.strategy, "_session", None)
            blocks = {f"blocks {kind}": count for kind, count in block_io().items()}
            if session is None or not session.shards:
                return dict(blocks)
            session.transfer.settle()
            return {**session.store.traffic, **{f"blocks {kind}": count for kind, count in block_io().items()}}

    return Watch()


if __name__ == "__main__":
    print(json.dumps(run(Job(**json.loads(sys.argv[1])))))
