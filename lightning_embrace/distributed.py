"""Ranks, devices, the default process group and Lightning's own collectives, as DDP has them."""

from __future__ import annotations

import atexit
import itertools
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_embrace.comm.base import Communicator
from lightning_embrace.comm.connect import Connection
from lightning_embrace.comm.horovod_install import HorovodUnavailableError, load_horovod
from lightning_embrace.comm.torch_backend import ExchangeError
from lightning_embrace.config import EmbRaceConfig
from lightning_embrace.elastic import attempt, store_of
from lightning_embrace.horovodrun import devices_of, environment_class, nodes_of
from lightning_embrace.launch import make_launcher
from lightning_embrace.mixin import Base
from lightning_embrace.monitor.files import horovod_path
from lightning_embrace.namespaces import Namespace
from lightning_embrace.tables.parked import parked_tables


class DistributedMixin(Base):
    """What any multi-process strategy must tell Lightning."""

    namespace: ClassVar[Namespace]
    config: EmbRaceConfig
    _num_nodes: int
    _connection: Connection | None
    _failed: bool
    _stopping: bool

    @property
    def is_distributed(self) -> bool:
        """Lightning asks this of strategies it does not know before it injects a DistributedSampler."""
        return True

    @property
    def root_device(self) -> torch.device:
        """This process' device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of ranks on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Replicas over all nodes, and this rank."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str:
        """``"gloo"``, ``"nccl"``, or one for each kind of device: ``"cpu:gloo,cuda:nccl"``."""
        nccl = self.root_device.type == "cuda" and self.config.communication == "torch"
        return self.config.process_group_backend or ("nccl" if nccl else "gloo")

    def _take_horovod(self) -> None:
        """With ``communication="horovod"``: it can be used, and horovodrun's ranks are known."""
        if self.config.communication != "horovod":
            return
        try:
            load_horovod()
        except HorovodUnavailableError as error:
            raise self.namespace.get_fabric("utilities.exceptions.MisconfigurationException")(str(error)) from error
        environment = environment_class(self.namespace)
        if self.cluster_environment is None and self.config.start_method == "popen" and environment.detect():
            self.cluster_environment = environment(self.config.timeout)

    def set_world_ranks(self) -> None:
        """Tells the cluster environment, and the rank-zero helpers, who this process is."""
        if self.cluster_environment is not None:
            self.parallel_devices = devices_of(self.cluster_environment, self.parallel_devices)
            self._num_nodes = nodes_of(self.cluster_environment, self._num_nodes)
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for rank_zero_only in (
            self.namespace.get("utilities.rank_zero.rank_zero_only"),
            self.namespace.get_fabric("utilities.rank_zero.rank_zero_only"),
        ):
            rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = make_launcher(self, self.namespace, self.config.start_method)

    def setup_environment(self) -> None:
        """Joins the default process group, on which Lightning and torchmetrics communicate, and the control channel."""
        super().setup_environment()
        self._begin_process()
        self.set_world_ranks()
        if not dist.is_initialized():
            self._join_default_group()
        self._failed = self._stopping = False
        self._connection = self._connect()

    def _begin_process(self) -> None:
        """What the Trainer's strategies do in every process before ranks meet."""
        if self.config.start_method == "forkserver" and self.lightning_module is not None:
            _unshare(self.lightning_module)
        self.namespace.get_fabric("utilities.seed.reset_seed")()

    def _connect(self) -> Connection:
        """Meets the other ranks. Collective."""
        assert self.cluster_environment is not None
        return Connection(
            self.global_rank,
            self.world_size,
            self.root_device,
            self._carrier(),
            self.config.timeout,
            self.cluster_environment.main_address,
            self._timeline_of_horovod(),
        )

    def _carrier(self) -> str:
        """What carries the exchanges of training."""
        if self.config.communication == "horovod":
            return "horovod"
        return _backend_for(self.root_device, self.process_group_backend)

    def _timeline_of_horovod(self) -> str | None:
        if self.config.communication != "horovod" or self.config.trace is None:
            return None
        return str(horovod_path(self.config.trace))

    def _join_default_group(self) -> None:
        assert self.cluster_environment is not None
        address, port = self.cluster_environment.main_address, self.cluster_environment.main_port
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
        name = attempt(os.environ)
        try:
            dist.init_process_group(
                self.process_group_backend,
                store=None if name is None else store_of(name, address, port, self.world_size, self.config.timeout),
                rank=self.global_rank,
                world_size=self.world_size,
                timeout=self.config.timeout,
                device_id=self.root_device if self.root_device.type != "cpu" else None,
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise ExchangeError(
                f"The exchange 'meeting of all ranks' failed on rank {self.global_rank}: {self.world_size} ranks have"
                f" not met at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within the `timeout` of"
                f" {self.config.timeout.total_seconds():g} s: {error} A rank has not been started, has ended early, or"
                " cannot reach this address."
            ) from error
        if "nccl" in self.process_group_backend:
            atexit.register(_leave_default_group)

    def _check_same_model(self, communicator: Communicator, model: nn.Module) -> None:
        """Ranks with different models would exchange tensors of different sizes."""
        # each rank has other columns of what was built as columns
        whole = {id(t.parameter): (t.rows, t.columns) for t in parked_tables(model)}
        described = [(n, whole.get(id(p), tuple(p.shape)), str(p.dtype)) for n, p in model.named_parameters()]
        described += [(n, tuple(b.shape), str(b.dtype)) for n, b in model.named_buffers()]
        print_ = zlib.crc32(repr(described).encode())
        prints = communicator.gather(torch.tensor([print_]), "fingerprint of the model").wait().flatten().tolist()
        different = [r for r, p in enumerate(prints) if p != prints[0]]
        if different:
            raise ValueError(
                f"The model of rank{'s' if len(different) > 1 else ''} {', '.join(map(str, different))} differs from"
                " rank 0's in the names, shapes or dtypes of its parameters and buffers. Build the same model on every"
                " rank, for example from the same vocabulary file."
            )

    def model_to_device(self) -> None:
        """Moves the model to this rank's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def _optimizer_to_device(self, optimizer: Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                # `step` stays where the optimizer made it: moving it to the GPU slows Adam down
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[key] = value.to(parameter.device)

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks on the default group."""
        if dist.is_initialized():
            devices = [self.root_device.index] if dist.get_backend() == "nccl" else None
            with self._naming(f"barrier {name!r}" if name else "barrier"):
                dist.barrier(device_ids=devices)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Sends an object from one rank to all."""
        if not dist.is_initialized():
            return obj
        held = [obj]
        with self._naming(f"broadcast of {type(obj).__name__}"):
            dist.broadcast_object_list(held, src)
        return held[0]

    def _gather_objects(self, own: Any, /) -> list[Any]:
        """Gives every rank's object to all, by rank."""
        if self.world_size == 1:
            return [own]
        everybodys: list[Any] = [None] * self.world_size
        with self._naming(f"gathering of {type(own).__name__}"):
            dist.all_gather_object(everybodys, own)
        return everybodys

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over all ranks; anything else is returned as it is.

        Args:
            tensor: The tensor.
            group: A process group, default all ranks.
            reduce_op: ``"mean"``, ``"avg"``, ``"sum"`` or a torch ReduceOp.

        Returns:
            The reduced tensor.
        """
        if isinstance(tensor, Tensor):
            sync = self.namespace.get_fabric("utilities.distributed._sync_ddp_if_available")
            with self._naming("reduction for a logged value"):
                return sync(tensor, group, reduce_op=reduce_op)
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers a tensor of equal shape from all ranks, [N, …]."""
        with self._naming("all_gather"):
            return super().all_gather(tensor, group, sync_grads)

    def _before_collective(self) -> None:
        """Comes before every collective of Lightning's."""

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Names the rank at fault should a collective of Lightning's break."""
        self._before_collective()
        with nullcontext() if self._connection is None else self._connection.naming(what):
            yield


def _backend_for(device: torch.device, backend: str) -> str:
    """The part of ``"cpu:gloo,cuda:nccl"`` that carries a device's tensors."""
    if ":" not in backend:
        return backend
    parts = dict(part.split(":") for part in backend.split(","))
    return parts.get(device.type, backend)


def _leave_default_group() -> None:
    """NCCL wants its groups destroyed before the process ends, and warns of those that are not."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _unshare(model: nn.Module) -> None:
    """Pickling puts tensors into shared memory, where the ranks would train one model between them.

    Lightning takes them out again for ``start_method="spawn"`` only.
    """
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        tensor.data = tensor.data.clone()
