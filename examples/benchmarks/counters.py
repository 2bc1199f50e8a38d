"""Reads what has crossed a link, from inside a rank's process or from outside.

The kernel counts frames with their Ethernet, IP and TCP headers. Between namespaces a packet is cut into frames only by
the shaper, if at all, so several frames share one header and the count lies closer to the payload than on copper. What
is shaped is the length as on copper.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

LINK_VARIABLE = "BENCHMARK_INTERFACE"  # names the link in a rank's environment; absent where a rank has none of its own


class LinkBytes(NamedTuple):
    """Bytes that a rank's link carried: ``sent`` from the rank, ``received`` to it."""

    sent: int
    received: int

    def since(self, earlier: LinkBytes) -> LinkBytes:
        """What was added after ``earlier``."""
        return LinkBytes(self.sent - earlier.sent, self.received - earlier.received)


class LinkCounters:
    """The counters of a network interface, kept open: one reading takes microseconds.

    What the rank has sent but the shaper still holds is not counted yet, so a single step may miss some of its own
    bytes and show them in the next one.

    Args:
        interface: Its name in the namespace of this process.
        root: Where the kernel lists interfaces.
    """

    def __init__(self, interface: str, root: Path = Path("/sys/class/net")) -> None:
        statistics = root / interface / "statistics"
        self._sent = os.open(statistics / "tx_bytes", os.O_RDONLY | os.O_CLOEXEC)
        self._received = os.open(statistics / "rx_bytes", os.O_RDONLY | os.O_CLOEXEC)

    @classmethod
    def of_this_rank(cls) -> LinkCounters | None:
        """The link of this process, None on loopback, which all ranks share: count payloads there."""
        interface = os.environ.get(LINK_VARIABLE)
        return cls(interface) if interface else None

    def read(self) -> LinkBytes:
        """Bytes since the link was made."""
        return LinkBytes(int(os.pread(self._sent, 32, 0)), int(os.pread(self._received, 32, 0)))

    def close(self) -> None:
        """Gives the files back."""
        os.close(self._sent)
        os.close(self._received)


def parse_link(output: str) -> LinkBytes:
    """Counters in the output of ``ip -s -j link show dev X``."""
    statistics = json.loads(output)[0]["stats64"]
    return LinkBytes(statistics["tx"]["bytes"], statistics["rx"]["bytes"])


def parse_drops(output: str) -> int:
    """Packets that the shapers dropped, in the output of ``tc -s -j qdisc show``."""
    return sum(queue.get("drops", 0) for queue in json.loads(output) if queue["kind"] in ("tbf", "netem"))
