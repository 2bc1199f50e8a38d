"""Ranks that ``horovodrun`` has started: who they are, and where they meet."""

from __future__ import annotations

import functools
import os
import socket
import time
from datetime import timedelta
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch

from lightning_embrace.comm.horovod_variables import address_towards
from lightning_embrace.comm.torch_backend import ExchangeError
from lightning_embrace.namespaces import LIGHTNING, Namespace

# where rank 0 writes its address, in the store of horovodrun
_KEY = "lightning_embrace/main"
_MEETING = timedelta(minutes=2)


class _HorovodEnvironmentMixin:
    """What ``horovodrun`` tells each process.

    On the way to rank 0's address, horovodrun's own store is asked: rank 0 has put it there. ``MASTER_ADDR`` and
    ``MASTER_PORT`` come first where they are set.

    Args:
        timeout: How long the others wait for rank 0 to do so.
    """

    def __init__(self, timeout: timedelta = _MEETING) -> None:
        self._timeout = timeout.total_seconds()
        self._main: tuple[str, int] | None = None

    @property
    def creates_processes_externally(self) -> bool:
        """They are all there."""
        return True

    @property
    def main_address(self) -> str:
        """Where rank 0 can be reached."""
        return self._meet()[0]

    @property
    def main_port(self) -> int:
        """A port of rank 0 that was free."""
        return self._meet()[1]

    @staticmethod
    def detect() -> bool:
        """Whether horovodrun has started this process."""
        return "HOROVOD_RANK" in os.environ and "HOROVOD_SIZE" in os.environ

    def world_size(self) -> int:
        """Number of ranks."""
        return int(os.environ["HOROVOD_SIZE"])

    def set_world_size(self, size: int) -> None:
        """It is what horovodrun says."""

    def global_rank(self) -> int:
        """This rank."""
        return int(os.environ["HOROVOD_RANK"])

    def set_global_rank(self, rank: int) -> None:
        """It is what horovodrun says."""

    def local_rank(self) -> int:
        """Its number on this host."""
        return int(os.environ["HOROVOD_LOCAL_RANK"])

    def local_size(self) -> int:
        """How many ranks this host has."""
        return int(os.environ["HOROVOD_LOCAL_SIZE"])

    def node_rank(self) -> int:
        """This host's number."""
        return int(os.environ["HOROVOD_CROSS_RANK"])

    def num_nodes(self) -> int:
        """Number of hosts."""
        return int(os.environ["HOROVOD_CROSS_SIZE"])

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuses a Trainer that wants another number of processes.

        Raises:
            ValueError: It does.
        """
        if num_devices * num_nodes != self.world_size():
            raise ValueError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}) does not fit `horovodrun -np"
                f" {self.world_size()}`: leave both out, or give devices={self.local_size()},"
                f" num_nodes={self.num_nodes()}."
            )

    def _meet(self) -> tuple[str, int]:
        if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
            return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if self._main is None:
            address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{part}") for part in ("ADDR", "PORT"))
            if address is None or port is None:
                raise RuntimeError(
                    "horovodrun has left no rendezvous, as it does under MPI. Set MASTER_ADDR to the first host and"
                    " MASTER_PORT to a free port there: `horovodrun -x MASTER_ADDR -x MASTER_PORT ...`."
                )
            store, first = f"http://{address}:{port}/{_KEY}", self.global_rank() == 0
            self._main = _tell(store, self._own(), self._timeout) if first else self._ask(store)
        return self._main

    def _ask(self, store: str) -> tuple[str, int]:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                with urlopen(store, timeout=self._timeout) as answer:
                    return _address_of(answer.read().decode())
            except HTTPError as error:
                if error.code != 404 or time.monotonic() > deadline:
                    raise ExchangeError(
                        f"The exchange 'meeting of all ranks' failed on rank {self.global_rank()}: rank 0 has not said"
                        f" at {store} where it can be reached, within the `timeout` of {self._timeout:g} s: {error}. It"
                        " has not come so far, or has ended early: look for the first error in its output."
                    ) from error
                time.sleep(0.1)

    def _own(self) -> str:
        address = "127.0.0.1"
        if self.num_nodes() > 1:
            address = address_towards(os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]) or socket.gethostname()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{address} {probe.getsockname()[1]}"


def _tell(store: str, own: str, timeout: float) -> tuple[str, int]:
    with urlopen(Request(store, data=own.encode(), method="PUT"), timeout=timeout):
        return _address_of(own)


def _address_of(written: str) -> tuple[str, int]:
    address, port = written.split()
    return address, int(port)


@functools.cache
def environment_class(namespace: Namespace) -> Any:
    """The cluster environment for ``horovodrun``, of a namespace of Lightning."""
    base = namespace.get_fabric("plugins.environments.ClusterEnvironment")
    return type("HorovodEnvironment", (_HorovodEnvironmentMixin, base), {"__doc__": _HorovodEnvironmentMixin.__doc__})


def devices_of(environment: Any, devices: list[torch.device] | None) -> list[torch.device] | None:
    """What a Trainer that names no devices has under ``horovodrun``: one for each rank of this host.

    Args:
        environment: The cluster environment.
        devices: Of the Trainer.
    """
    if not isinstance(environment, _HorovodEnvironmentMixin) or devices is None or len(devices) != 1:
        return devices
    if devices[0].type == "cpu":
        return devices * environment.local_size()
    return [torch.device(devices[0].type, index) for index in range(environment.local_size())]


def nodes_of(environment: Any, nodes: int) -> int:
    """What a Trainer that names no number of nodes has under ``horovodrun``."""
    return environment.num_nodes() if isinstance(environment, _HorovodEnvironmentMixin) and nodes == 1 else nodes


HorovodEnvironment = environment_class(LIGHTNING)
