"""Horovod on Gloo: dense AllReduce of everything, or its sparse path, AllGather of ids and rows.

AllReduce is at its best here with ``sparse=False`` tables: a sparse gradient would be made dense by
``sparse_as_dense`` and sparse again for the optimizer. AllGather sends a sparse gradient as it finds it; the rows of
equal ids are summed before, which costs one hook. Fusion, cycle time and overlap with the backward pass are Horovod's
defaults.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import horovod.torch as hvd
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed import TCPStore

from examples.benchmarks import kernel
from examples.benchmarks.counters import LINK_VARIABLE
from examples.benchmarks.job import Job
from examples.benchmarks.meter import Meter
from examples.benchmarks.peers.plain import optimizer_of, without_trainer
from examples.benchmarks.work import Work, rank


def train(job: Job) -> dict[str, Any]:
    """Trains the job's model on this rank's batches."""
    server = _start(rank(), job.ranks)
    work = Work(job)
    meter = Meter(job.warmup)
    model = without_trainer(work.model).train()
    optimizer = _distributed(model)
    meter.boundary()
    for number, batch in enumerate(work.batches[: work.steps]):
        optimizer.zero_grad()
        loss = model.training_step(batch, number)
        loss.backward()
        optimizer.step()
        meter.loss(float(loss.detach()))
        meter.boundary()
    result = meter.result()
    hvd.barrier()  # a shutdown ends all ranks
    hvd.shutdown()
    if server is not None:
        server.stop()
    return result


def _distributed(model: LightningModule) -> Any:
    for parameter in model.parameters():
        parameter.register_hook(_coalesced)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return hvd.DistributedOptimizer(
        optimizer_of(model), named_parameters=model.named_parameters(), sparse_as_dense=False, op=hvd.Average
    )


def _coalesced(gradient: Tensor) -> Tensor | None:
    return gradient.coalesce() if gradient.is_sparse else None


def _start(number: int, ranks: int) -> RendezvousServer | None:
    """Initialises Horovod on ranks that were started already, each as a host of its own.

    Returns:
        On rank 0, what the others rendezvous with.
    """
    address = os.environ["MASTER_ADDR"]
    # A rank that is missing at `hvd.init` aborts the process: all meet here first, and learn the server's port.
    store = TCPStore(
        address, int(os.environ["MASTER_PORT"]), ranks, is_master=number == 0, timeout=timedelta(seconds=60)
    )
    server = None
    if number == 0:
        server = RendezvousServer()
        port = server.start()
        hosts = ",".join(f"rank{r}:1" for r in range(ranks))
        server.init(get_host_assignments(parse_hosts(hosts), ranks))
        store.set("port", str(port))
    os.environ.update(environment(number, ranks, address, int(store.get("port"))))
    if LINK_VARIABLE in os.environ:
        # Horovod forgets its interface when it connects a process set, the one of all ranks included, and takes the
        # address that the host name has: in a namespace that is loopback, where nobody is.
        kernel.take_host_name(kernel.address_towards(address))
    hvd.init()
    return server


def environment(number: int, ranks: int, address: str, port: int) -> dict[str, str]:
    """What ``horovodrun`` would set."""
    return {
        "HOROVOD_RANK": str(number),
        "HOROVOD_SIZE": str(ranks),
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(number),
        "HOROVOD_CROSS_SIZE": str(ranks),
        "HOROVOD_HOSTNAME": f"rank{number}",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": os.environ.get(LINK_VARIABLE) or os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
