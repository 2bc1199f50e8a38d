"""A job's model and this rank's batches, the same for every peer."""

from __future__ import annotations

import os

import torch

from examples.benchmarks.compute import set_compute, spread
from examples.benchmarks.data import StepBatches, make_source
from examples.benchmarks.job import Job
from examples.benchmarks.peers import PEERS
from examples.models.registry import batch_spec, build


def rank() -> int:
    """This process' rank, as the launcher says it."""
    return int(os.environ.get("NODE_RANK", 0)) + int(os.environ.get("LOCAL_RANK", 0))


class Work:
    """What a peer trains.

    Args:
        job: The job.

    Attributes:
        model: A LightningModule whose ``training_step`` returns the loss.
        batches: This rank's batches, one per step, and one more: who looks ahead has what to see in the last step.
        steps: How many to take.
        blocks: Bytes of the parameters of each part that computes, in the order of the forward pass.
    """

    def __init__(self, job: Job) -> None:
        torch.manual_seed(job.seed)
        chosen = {"vocabulary": job.vocabulary or None}
        spec = batch_spec(
            job.model,
            job.size,
            batch=job.batch or None,
            length=job.length or None,
            negatives=job.negatives or None,
            **chosen,
        )  # type: ignore[arg-type]
        self.model = build(
            job.model,
            job.size,  # type: ignore[arg-type]
            dim=job.dim or None,
            sparse=PEERS[job.peer].sparse,
            optimizer=job.optimizer,  # type: ignore[arg-type]
            **chosen,  # type: ignore[arg-type]
        )
        self.blocks = [sum(p.numel() * p.element_size() for p in b.parameters()) for _, b in self.model.blocks()]  # type: ignore[operator]
        if job.compute == "emulated":
            set_compute(self.model, "emulated", spread(self.model, job.compute_ms / 1e3))  # type: ignore[arg-type]
        source = make_source(spec, job.exponent, job.text)
        self.steps = job.warmup + job.steps
        self.batches = list(StepBatches(spec, source, rank(), self.steps + 1, job.seed))
