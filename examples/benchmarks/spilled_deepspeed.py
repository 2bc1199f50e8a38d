"""The job of :mod:`examples.benchmarks.spilled_job` under DeepSpeed ZeRO-3 with everything offloaded to the host.

Runs in DeepSpeed's own environment (``examples/benchmarks/environment.sh deepspeed``), on one rank over gloo.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from examples.benchmarks.spilled_job import Job


def run(job: Job) -> dict[str, Any]:
    """Trains in this process.

    Args:
        job: Sizes; budgets do not count.

    Returns:
        Seconds, losses and peak memory, as the job's own :func:`~examples.benchmarks.spilled_job.run` gives them.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    import deepspeed  # type: ignore[import-not-found]
    import torch

    from examples.benchmarks.own_ranks import status
    from examples.benchmarks.spilled_gpt import SpilledGPT, batches, parameters_of

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = SpilledGPT(job.dim, job.layers, job.vocabulary, job.length, job.optimizer)
    model.configure_model()
    model.forward = lambda batch: model.training_step(batch, 0)  # type: ignore[method-assign]
    to_host = {"device": "cpu"}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=model.configure_optimizers(),
        config={
            "train_micro_batch_size_per_gpu": job.sequences,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # else by a norm of 1
            "zero_optimization": {"stage": 3, "offload_param": to_host, "offload_optimizer": to_host},
        },
    )
    seconds = []
    for batch in batches(job.steps, job.sequences, job.length, job.vocabulary):
        began = time.perf_counter()
        engine.backward(engine(batch))
        engine.step()
        seconds.append(time.perf_counter() - began)
    return {
        "parameters": parameters_of(job.dim, job.layers, job.vocabulary, job.length),
        "threads": torch.get_num_threads(),
        "losses": model.losses,
        "seconds": seconds,
        "peak": {"afterwards": status("VmHWM")},
    }
