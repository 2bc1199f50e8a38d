"""TorchRec: all tables sharded column-wise or row-wise, under its own pipeline. On CPU its fused optimizer is SGD.

TorchRec wants a batch that says what it looks up before the model runs. A pass over the batches before the measured
steps finds that out (:mod:`examples.benchmarks.peers.lookups`), so its pipeline exchanges the ids of the next batch
while the current one computes, as it is meant to. Its ``use_index_dedup`` has no CPU kernel, so that pass deduplicates
the ids of each table, as a data loader would, and rows are repeated after they came: each travels once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn import functional as F
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.streamable import Pipelineable

from examples.benchmarks.job import Job
from examples.benchmarks.meter import Meter
from examples.benchmarks.peers.lookups import Emptied, Lookup, Table, find_tables, ids_of
from examples.benchmarks.peers.plain import optimizer_of, sgd_rate, without_trainer
from examples.benchmarks.work import Work, rank


@dataclass
class Batch(Pipelineable):
    """A batch and what it looks up.

    Attributes:
        number: Of the step.
        batch: As the model takes it.
        lookups: In the order of the calls.
        features: The distinct ids by table, for each collection of tables.
        inverse: Of each table, where among its distinct ids each id is.
    """

    number: int
    batch: Any
    lookups: list[Lookup]
    features: list[KeyedJaggedTensor]
    inverse: dict[str, Tensor]

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        return None


class _Rest(nn.Module):
    """Everything but the tables."""

    def __init__(self, model: LightningModule, emptied: Emptied) -> None:
        super().__init__()
        self.model = model
        self._emptied = emptied

    def forward(self, batch: Batch, looked_up: list[Any]) -> tuple[Tensor, Tensor]:
        distinct = {name: jagged.values() for found in looked_up for name, jagged in found.wait().items()}
        rows = {name: F.embedding(batch.inverse[name], values) for name, values in distinct.items()}
        with self._emptied.rows(batch.lookups, rows):
            loss = self.model.training_step(batch.batch, batch.number)
        return loss, loss.detach()


class _Model(nn.Module):
    """The tables, then the rest: the form in which the pipeline sees that a look-up depends on the batch alone."""

    def __init__(self, collections: list[EmbeddingCollection], rest: nn.Module) -> None:
        super().__init__()
        self.collections = nn.ModuleList(collections)
        self.rest = rest

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        looked_up = [collection(batch.features[i]) for i, collection in enumerate(self.collections)]
        found: tuple[Tensor, Tensor] = self.rest(batch, looked_up)
        return found


def train(job: Job) -> dict[str, Any]:
    """Trains the job's model on this rank's batches."""
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    dist.init_process_group("gloo", rank=rank(), world_size=job.ranks)
    work = Work(job)
    meter = Meter(job.warmup)
    pipeline, batches = _pipeline(work, job)
    meter.boundary()
    iterator = iter(batches)
    for _ in batches[: work.steps]:
        meter.loss(float(pipeline.progress(iterator)))
        meter.boundary()
    result = meter.result()
    dist.barrier()
    return result


def _pipeline(work: Work, job: Job) -> tuple[TrainPipelineSparseDist[Batch, Tensor], list[Batch]]:
    model = without_trainer(work.model).train()
    tables = find_tables(model)
    groups = _by_width(tables)
    emptied = Emptied(model, tables)
    batches = []
    for number, batch in enumerate(work.batches):
        lookups = emptied.record(lambda n=number, b=batch: model.training_step(b, n))  # type: ignore[misc]
        unique = {t.name: torch.unique(ids_of(lookups, t.name), return_inverse=True) for t in tables}
        ids, inverse = ({name: pair[k] for name, pair in unique.items()} for k in (0, 1))
        batches.append(Batch(number, batch, lookups, [_features(ids, group) for group in groups], inverse))
    optimizer = optimizer_of(model)
    collections = [_collection(group, sgd_rate(optimizer)) for group in groups]
    del tables, groups  # the shards are copies
    sharded = DistributedModelParallel(
        _Model(collections, _Rest(model, emptied)),
        device=torch.device("cpu"),
        plan=_plan(collections, job),
        sharders=[_SHARDER],
    )
    return TrainPipelineSparseDist(sharded, optimizer, torch.device("cpu")), batches


_SHARDER: Any = EmbeddingCollectionSharder()


def _by_width(tables: list[Table]) -> list[list[Table]]:
    """A collection has tables of one width."""
    widths = dict.fromkeys(table.weight.shape[1] for table in tables)
    return [[table for table in tables if table.weight.shape[1] == width] for width in widths]


def _features(ids: dict[str, Tensor], tables: list[Table]) -> KeyedJaggedTensor:
    names = [table.name for table in tables]
    return KeyedJaggedTensor(
        keys=names,
        values=torch.cat([ids[name] for name in names]),
        lengths=torch.tensor([len(ids[name]) for name in names], dtype=torch.int32),
    )


def _collection(tables: list[Table], rate: float) -> EmbeddingCollection:
    """The tables with their seeded weights, and SGD to be fused into their backward."""
    configs = [
        EmbeddingConfig(
            name=table.name,
            feature_names=[table.name],
            num_embeddings=table.weight.shape[0],
            embedding_dim=table.weight.shape[1],
            init_fn=lambda weight: None,  # its pages are never touched
        )
        for table in tables
    ]
    collection = EmbeddingCollection(tables=configs, device=torch.device("cpu"))
    for table in tables:
        collection.embeddings[table.name].weight = table.weight
    _apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": rate})
    return collection


def _plan(collections: list[EmbeddingCollection], job: Job) -> ShardingPlan:
    def way() -> Any:
        return row_wise() if job.peer == "torchrec-row" else column_wise(ranks=list(range(job.ranks)))

    return ShardingPlan(
        {
            f"collections.{i}": construct_module_sharding_plan(
                collection,
                {config.name: way() for config in collection.embedding_configs()},
                sharder=_SHARDER,
                local_size=job.ranks,
                world_size=job.ranks,
                device_type="cpu",
            )
            for i, collection in enumerate(collections)
        }
    )
