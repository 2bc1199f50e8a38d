"""What an emulated cluster is made of: names, addresses and the commands that build it. Nothing here runs anything.

Every rank has a network namespace, and one more namespace holds the switch, a bridge. A cable (a veth pair) joins each
rank to a port of the switch. Both of its ends are shaped where they send: the rank's end is its up-link, the port its
down-link, so each direction has the full rate. All of it stands inside namespaces of our own, so the machine's own
network sees nothing, and what the names lead to is all there is to remove.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

PREFIX = "embrace"
INTERFACE = "eth0"  # a rank's end of its cable
MAX_RANKS = 64

# A shaped link may send at once what it may send in this time. That must be short beside an exchange, whose measured
# time it shortens, but longer than a timer may be late: with half of it a link of 100 Mbit/s lost a tenth of its rate.
BURST_S = 0.5e-3
_FRAME = 1514  # an Ethernet frame without its checksum, as the kernel counts it
_MIN_BURST = 4 * _FRAME
_MAX_GSO = 65_536  # the kernel's own limit for a packet that is cut into frames at the device only
# Enough for what several senders have under way to one receiver: what a queue drops costs a pause of 0.2 s.
QUEUE_BYTES = 16_000_000


@dataclass(frozen=True)
class Link:
    """How one rank is connected.

    Attributes:
        rate: Bits per second of each direction; None leaves the link as fast as the machine is.
        delay_s: What each direction adds. A message crosses two links, its sender's and its receiver's.
    """

    rate: int | None
    delay_s: float = 0.0

    @property
    def burst(self) -> int:
        """Bytes that may leave at once."""
        return max(_MIN_BURST, int((self.rate or 0) / 8 * BURST_S))

    @property
    def gso(self) -> int:
        """The largest packet handed to the link: it must fit in the burst, or the shaper cuts it up frame by frame."""
        return min(_MAX_GSO, int(self.burst * 0.9))


@dataclass(frozen=True)
class Owner:
    """The process that a cluster belongs to. A pid alone would keep a dead owner alive once it is given out again.

    Attributes:
        pid: Its process id.
        started: When it started, in the kernel's clock ticks since boot.
    """

    pid: int
    started: int


@dataclass(frozen=True)
class Names:
    """Names of one cluster's namespaces and of its folder.

    Attributes:
        owner: The process it belongs to.
        serial: Which of that process' clusters it is.
    """

    owner: Owner
    serial: int

    @property
    def cluster(self) -> str:
        """What all names of this cluster begin with."""
        return f"{PREFIX}-{self.owner.pid}-{self.owner.started}-{self.serial}"

    @property
    def switch(self) -> str:
        """The namespace of the switch."""
        return f"{self.cluster}-switch"

    @property
    def folder(self) -> str:
        """The folder of temporary files."""
        return f"{self.cluster}-files"

    def rank(self, rank: int) -> str:
        """The namespace of a rank."""
        return f"{self.cluster}-rank{rank}"


_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-(\d+)-(?:switch|rank\d+|files)")


def names_of(name: str) -> Names | None:
    """The cluster that a namespace or a folder belongs to, None when it is not one of ours."""
    match = _NAME.fullmatch(name)
    return Names(Owner(int(match[1]), int(match[2])), int(match[3])) if match else None


def belonging_to(names: Names, found: Iterable[str]) -> list[str]:
    """What of ``found`` is part of the cluster ``names``."""
    return sorted(name for name in found if names_of(name) == names)


def clusters_among(names: Iterable[str]) -> set[Names]:
    """The clusters that any of these namespaces and folders belong to."""
    return {found for found in map(names_of, names) if found is not None}


def stale_clusters(names: Iterable[str], alive: Iterable[Owner]) -> list[Names]:
    """The clusters among ``names`` whose owner is not among the live processes."""
    found = clusters_among(names)
    return sorted(found - {n for n in found if n.owner in set(alive)}, key=lambda n: n.cluster)


def started_at(stat: str) -> int | None:
    """A process' start in clock ticks since boot, from its ``/proc/PID/stat``; None for one that has ended."""
    fields = stat.rpartition(")")[2].split()  # its name, which comes before, may hold blanks and brackets
    return None if fields[0] in "ZX" else int(fields[19])


def address(rank: int) -> str:
    """A rank's address. It exists only inside the namespaces."""
    return f"10.77.0.{rank + 1}"


def shaping(namespace: str, device: str, link: Link) -> list[list[str]]:
    """The commands that shape what ``device`` sends."""
    tc = ["tc", "-n", namespace, "qdisc", "add", "dev", device]
    commands = []
    parent = ["root"]
    if link.rate is not None:
        bucket = ["tbf", "rate", f"{link.rate}bit", "burst", str(link.burst), "limit", str(QUEUE_BYTES)]
        commands.append([*tc, *parent, "handle", "1:", *bucket])
        parent = ["parent", "1:1"]
    if link.delay_s > 0:
        microseconds = f"{link.delay_s * 1e6:g}us"
        packets = str(QUEUE_BYTES // _FRAME)
        commands.append([*tc, *parent, "handle", "2:", "netem", "delay", microseconds, "limit", packets])
    return commands


def building(names: Names, links: list[Link]) -> list[list[str]]:
    """The commands that build the cluster, in order."""
    switch = names.switch
    bridge = ["type", "bridge", "stp_state", "0", "forward_delay", "0", "mcast_snooping", "0"]
    commands = [
        ["ip", "netns", "add", switch],
        ["ip", "-n", switch, "link", "add", "br0", *bridge],
        ["ip", "-n", switch, "link", "set", "br0", "addrgenmode", "none", "up"],
    ]
    for rank, link in enumerate(links):
        commands += _connecting(names.rank(rank), switch, f"port{rank}", address(rank), link)
    return commands


def _connecting(namespace: str, switch: str, port: str, own_address: str, link: Link) -> list[list[str]]:
    gso = ["gso_max_size", str(link.gso)] if link.rate is not None else []
    quiet = ["addrgenmode", "none"]  # no IPv6 address, hence none of its background chatter in the counters
    return [
        ["ip", "netns", "add", namespace],
        ["ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", namespace],
        ["ip", "-n", switch, "link", "set", port, "master", "br0", *quiet, *gso, "up"],
        ["ip", "-n", namespace, "link", "set", "lo", "up"],
        ["ip", "-n", namespace, "addr", "add", f"{own_address}/24", "dev", INTERFACE],
        *shaping(namespace, INTERFACE, link),
        *shaping(switch, port, link),
        ["ip", "-n", namespace, "link", "set", INTERFACE, *quiet, *gso, "up"],
    ]


def removing(namespace: str) -> list[str]:
    """The command that removes a namespace, and with it what is inside."""
    return ["ip", "netns", "del", namespace]


def entering(namespace: str, command: list[str]) -> list[str]:
    """``command`` as run inside a namespace."""
    return ["ip", "netns", "exec", namespace, *command]
