"""Starts Horovod on ranks that are there already, whoever has started them, and ends it in any state.

The ranks have a torch.distributed group by then. It says that all are there (a peer that is missing makes Horovod abort
the process), and tells where each one runs and where rank 0's rendezvous is. So nothing depends on the launcher: the
Trainer's own, torchrun, Slurm and ``horovodrun`` lead to the same start. Under MPI, Horovod finds the ranks itself. A
peer that is lost from then on is noticed by the control channel or ``timeout``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_embrace.comm import horovod_variables as v
from lightning_embrace.comm.control import Control
from lightning_embrace.comm.horovod_abort import abort_averted

# how long one wait may last before the control channel is asked whether another rank has failed
_SLICE_SECONDS = 0.2
# how long Horovod may take to end once its connections are closed
_END_SECONDS = 2.0


class HorovodProcess:
    """Horovod in this process, from its start to its end. Collective, on torch.distributed's default group.

    Args:
        horovod: ``horovod.torch``.
        control: The channel on which ranks report failures.
        main_address: Where rank 0 can be reached.
        timeout: How long an exchange may take.
        timeline: Where rank 0 writes Horovod's own timeline, if anywhere.

    Raises:
        RankFailedError: Another rank failed meanwhile.
        RuntimeError: Horovod has not started within ``timeout``, or a connection broke; or it numbers the ranks
            otherwise than torch.distributed does.
    """

    def __init__(
        self, horovod: Any, control: Control, main_address: str, timeout: timedelta, timeline: str | None
    ) -> None:
        self._horovod = horovod
        self._control = control
        self._timeout = timeout.total_seconds()
        self._connections: dict[int, int] = {}
        settings = v.settings(timeout, timeline, os.environ)
        if v.under_mpi(horovod.gloo_built(), os.environ):
            with v.set_for_a_while(settings):
                self._start()
        else:
            with _rendezvous(main_address) as met, v.set_for_a_while({**met, **settings}):
                self._start()

    def shut_down(self) -> None:
        """Ends it in good order. One rank's end ends it for all: call it after a barrier."""
        self._horovod.shutdown()

    def sever(self) -> None:
        """Ends it after a failure: closes its connections, so that what is under way raises, here and elsewhere.

        Horovod's thread may wait for a peer that does not answer, for as long as the timeout, and the process for that
        thread. The other ranks see closed connections: tell them the reason before.
        """
        for fd, inode in self._connections.items():
            if _inode(fd) == inode:
                with contextlib.suppress(OSError):
                    _shut(fd)
        self._connections = {}
        if not _in_thread(self._horovod.shutdown).wait(_END_SECONDS):
            _end_without_waiting()

    def _start(self) -> None:
        before = _sockets()
        try:
            self._initialise()
            self._connections = {fd: inode for fd, inode in _sockets().items() if before.get(fd) != inode}
            dist.barrier()  # the rendezvous ends when all have met
            self._check_numbers()
        except BaseException:
            _end_without_waiting()
            raise

    def _initialise(self) -> None:
        raised: list[BaseException] = []

        def run() -> None:
            try:
                self._horovod.init()
            except BaseException as error:
                raised.append(error)

        until = time.monotonic() + self._timeout
        with abort_averted() as thrown:
            done = _in_thread(run)
            while not done.wait(_SLICE_SECONDS):
                self._control.check()
                if thrown.is_set():
                    raise RuntimeError("one of Horovod's connections broke, or was not made in time")
                if time.monotonic() > until:
                    raise RuntimeError(f"it has not ended within {self._timeout:g} s, the `timeout`")
        if raised:
            raise raised[0]

    def _check_numbers(self) -> None:
        mine = (dist.get_rank(), dist.get_world_size())
        theirs = (self._horovod.rank(), self._horovod.size())
        if mine != theirs:
            raise RuntimeError(
                f"This is rank {mine[0]} of {mine[1]} for torch.distributed and rank {theirs[0]} of {theirs[1]} for"
                " Horovod. Start the ranks with mpirun, and give the strategy a cluster_environment that numbers them"
                " as MPI does."
            )


@contextmanager
def _rendezvous(main_address: str) -> Iterator[dict[str, str]]:
    """Where all ranks meet while they start: a small server in rank 0's process. Collective.

    Yields:
        The variables that lead this rank there.
    """
    rank, name = dist.get_rank(), socket.gethostname()
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, name)
    v.check_host_name(len(set(hosts)), name, v.resolved(name))
    where = v.places(hosts)
    server, port = _serve(where) if rank == 0 else (None, 0)
    try:
        ports = [port]
        dist.broadcast_object_list(ports, src=0)
        yield v.of_place(rank, where, main_address, ports[0], v.interface_towards(main_address, len(set(hosts))))
    finally:
        if server is not None:
            _in_thread(partial(_stop, server))


def _serve(where: Sequence[v.Place]) -> tuple[Any, int]:
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    server.init(
        [
            SlotInfo(p.host, rank, p.local_rank, p.cross_rank, len(where), p.local_size, p.cross_size)
            for rank, p in enumerate(where)
        ]
    )
    return server, port


def _stop(server: Any) -> None:
    server.stop()  # takes half a second: its loop has a look twice a second
    server._httpd.server_close()


def _in_thread(function: Any) -> threading.Event:
    done = threading.Event()

    def run() -> None:
        try:
            function()
        finally:
            done.set()

    threading.Thread(target=run, name="embrace-horovod", daemon=True).start()
    return done


def _sockets() -> dict[int, int]:
    """This process' sockets: by descriptor, what is behind it."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        inode = _inode(int(name))
        if inode is not None:
            found[int(name)] = inode
    return found


def _inode(fd: int) -> int | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _shut(fd: int) -> None:
    with socket.socket(fileno=os.dup(fd)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _end_without_waiting() -> None:
    """When this process ends, it does so at once: else it would wait for Horovod's thread, which waits for a peer."""

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)

    atexit.register(leave)
