"""What ``horovodrun`` would tell each rank, worked out from where the ranks run."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

#: milliseconds between two rounds of negotiation, unless HOROVOD_CYCLE_TIME says otherwise. Horovod's own 1 ms makes an
#: exchange hardly faster and costs each rank a third of a core while it has nothing to say, this one half of that
CYCLE_MILLISECONDS = 5
#: nobody has this address: only the way to it is asked for, and nothing is sent
_ELSEWHERE = "192.0.2.1"


class Place(NamedTuple):
    """Where a rank runs.

    Attributes:
        host: Its host.
        local_rank: Its number among the ranks of its host.
        local_size: How many those are.
        cross_rank: Its number among the ranks with its local rank.
        cross_size: How many those are.
    """

    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def places(hosts: Sequence[str]) -> list[Place]:
    """Every rank's place, given every rank's host."""
    local = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    return [
        Place(host, local[rank], hosts.count(host), local[:rank].count(local[rank]), local.count(local[rank]))
        for rank, host in enumerate(hosts)
    ]


def of_place(rank: int, where: Sequence[Place], address: str, port: int, interface: str | None) -> dict[str, str]:
    """The variables that say where a rank is, and where all meet.

    Args:
        rank: The rank.
        where: Every rank's place.
        address: Of the rendezvous.
        port: Of the rendezvous.
        interface: The network interface for Gloo, None for Horovod's choice.
    """
    mine = where[rank]
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(len(where)),
        "HOROVOD_LOCAL_RANK": str(mine.local_rank),
        "HOROVOD_LOCAL_SIZE": str(mine.local_size),
        "HOROVOD_CROSS_RANK": str(mine.cross_rank),
        "HOROVOD_CROSS_SIZE": str(mine.cross_size),
        "HOROVOD_HOSTNAME": mine.host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        **({} if interface is None else {"HOROVOD_GLOO_IFACE": interface}),
    }


def settings(timeout: timedelta, timeline: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a user may have set otherwise; then they stay.

    Args:
        timeout: How long an exchange may take.
        timeline: Where rank 0 writes Horovod's timeline, if anywhere.
        environment: What is set already.
    """
    wanted = {
        "HOROVOD_CYCLE_TIME": str(CYCLE_MILLISECONDS),
        # of a peer that is stopped; one that is merely busy answers
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, round(timeout.total_seconds()))),
        **({} if timeline is None else {"HOROVOD_TIMELINE": timeline}),
    }
    return {name: environment.get(name, value) for name, value in wanted.items()}


def under_mpi(gloo_built: bool, environment: Mapping[str, str]) -> bool:
    """Whether MPI has started the ranks, and Horovod finds them through it."""
    return not gloo_built or environment.get("HOROVOD_CONTROLLER", "").lower() == "mpi"


@contextmanager
def set_for_a_while(wanted: Mapping[str, str]) -> Iterator[None]:
    """Puts variables into this process' environment: Horovod reads them only while it starts.

    Left there, they would tell whatever this process starts that ``horovodrun`` had started it.
    """
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def interface_towards(address: str, hosts: int) -> str | None:
    """The network interface on the way to an address, by which the other ranks can reach this one.

    Args:
        address: Rank 0's.
        hosts: The number of hosts. With several of them it is no loopback, which a host's own name often means.
    """
    chosen = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        return chosen.split(",")[0]
    mine = address_towards(address)
    if hosts > 1 and (mine is None or mine.startswith("127.")):
        mine = address_towards(_ELSEWHERE)
    return None if mine is None else _interface_of(mine)


def check_host_name(hosts: int, name: str, address: str | None) -> None:
    """Horovod 0.28 takes one of its connections to the address of the host's own name, whatever the interface.

    Args:
        hosts: The number of hosts.
        name: This one's.
        address: What the name resolves to here.

    Raises:
        RuntimeError: Other hosts could not reach this one there: Horovod would wait, and then abort the process.
    """
    if hosts > 1 and (address is None or address.startswith("127.")):
        raise RuntimeError(
            f"The host name {name!r} resolves to {address or 'nothing'} on this host. With several hosts, Horovod needs"
            " an address there that the others can reach: correct the line in /etc/hosts."
        )


def resolved(name: str) -> str | None:
    """The IPv4 address of a name, None where it has none."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def address_towards(other: str) -> str | None:
    """This host's IPv4 address on the way to another, None where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str | None:
    import psutil  # Horovod needs it too

    for name, found in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in found):
            return str(name)
    return None
