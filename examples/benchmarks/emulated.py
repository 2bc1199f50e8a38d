"""The emulated cluster: builds it, says what it is, removes it."""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Literal

from examples.benchmarks import host, netplan
from examples.benchmarks.counters import LinkBytes, parse_drops, parse_link
from examples.benchmarks.interrupts import SignalsRaise, undisturbed
from examples.benchmarks.netplan import INTERFACE, Link, Names
from examples.benchmarks.rates import parse_delay, parse_rate, per_rank, show_rate

Kind = Literal["auto", "namespaces", "loopback"]
_serial = itertools.count()


class Cluster:
    """N ranks, each in a network namespace behind its own shaped link; on loopback where that cannot be had.

    A context manager. What it made is removed when the block ends, also by an exception, Ctrl-C or SIGTERM. A killed
    process cannot do that: the next cluster on the machine removes what it left.

    Args:
        ranks: N.
        rate: Rate of each direction of a link, as ``"100mbit"`` or ``"none"``; or one for each rank.
        delay: What each direction of a link adds, as ``"0.2ms"``; or one for each rank.
        kind: ``"namespaces"``, ``"loopback"``, or ``"auto"``: the former if this machine can.

    Attributes:
        kind: ``"namespaces"`` or ``"loopback"``, what was had.
        notes: What differs from what was asked for. Print them beside every number.
        links: Rates and delays as they are, by rank.
        folder: For files; it goes with the cluster.
    """

    def __init__(
        self,
        ranks: int,
        rate: str | Sequence[str] = "1gbit",
        delay: str | Sequence[str] | None = None,
        kind: Kind = "auto",
    ) -> None:
        if not 1 <= ranks <= netplan.MAX_RANKS:
            raise ValueError(f"{ranks} ranks were asked for. Between 1 and {netplan.MAX_RANKS} are possible.")
        self.ranks = ranks
        rates = [parse_rate(text) for text in per_rank(rate, ranks, "rate")]
        delays = [parse_delay(text) for text in per_rank(delay or "0", ranks, "delay")]
        self.links = [Link(*both) for both in zip(rates, delays)]
        self.kind: Kind = kind
        self.notes: list[str] = []
        owner = host.owner_of(os.getpid())
        assert owner is not None
        self.names = Names(owner, next(_serial))
        self.folder = host.folder(self.names)
        self._signals = SignalsRaise()

    def __enter__(self) -> Cluster:
        self._signals.start()
        atexit.register(self.close)  # a Ctrl-C may come before the block has begun
        try:
            self._settle_on_kind()
            self.folder.mkdir(mode=0o700)
            if self.kind == "namespaces":
                for command in netplan.building(self.names, self.links):
                    host.run(command)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kills what runs in the cluster and removes it. May be called again."""
        if self.names.owner.pid != os.getpid():
            return  # a fork of the owner
        try:
            with undisturbed():
                try:
                    host.remove(self.names)
                finally:
                    atexit.unregister(self.close)
        finally:
            self._signals.stop()  # not inside: what holds signals off puts back the handlers that it found

    @property
    def main_address(self) -> str:
        """Where the others reach rank 0."""
        return netplan.address(0) if self.kind == "namespaces" else "127.0.0.1"

    @property
    def interface(self) -> str:
        """A rank's network interface, in its own namespace."""
        return INTERFACE if self.kind == "namespaces" else "lo"

    def namespace(self, rank: int) -> str | None:
        """The network namespace in which a rank finds itself on its link; None: this process' own."""
        return self.names.rank(rank) if self.kind == "namespaces" else None

    def read_link(self, rank: int) -> LinkBytes | None:
        """A rank's counters, read from outside; None on loopback. Inside use ``LinkCounters``, which is far cheaper."""
        if self.kind != "namespaces":
            return None
        return parse_link(host.run(["ip", "-n", self.names.rank(rank), "-s", "-j", "link", "show", "dev", INTERFACE]))

    def drops(self) -> int:
        """Packets that the shapers dropped so far. Each is a pause; there should be none."""
        if self.kind != "namespaces":
            return 0
        places = [self.names.switch, *map(self.names.rank, range(self.ranks))]
        return sum(parse_drops(host.run(["tc", "-n", place, "-s", "-j", "qdisc", "show"])) for place in places)

    @property
    def description(self) -> str:
        """What it is, in a line, and below it each thing that differs from what was asked for."""
        if self.kind == "loopback":
            line = f"{self.ranks} ranks on loopback, not shaped; bytes are counted payloads"
        else:
            rates = sorted({(link.rate is None, link.rate, link.delay_s) for link in self.links})
            kinds = [f"{show_rate(rate)}, delay {delay * 1e3:g} ms" for _, rate, delay in rates]
            line = f"{self.ranks} ranks in namespaces, links of {' and '.join(kinds)} each way; bytes are the link's"
        return "\n".join([line, *(f"note: {note}" for note in self.notes)])

    def _settle_on_kind(self) -> None:
        for stale in host.remove_stale():
            self.notes.append(f"removed what a killed run left: {stale.cluster}")
        if self.kind == "loopback":
            return
        found = host.ability(self.names)
        if not found.namespaces:
            if self.kind == "namespaces":
                raise RuntimeError(
                    f"Network namespaces were asked for, but: {found.why_not}. Run as root, or write kind='loopback'."
                )
            self.kind = "loopback"
            self.notes.append(f"no emulated links ({found.why_not}): loopback, whose speed says nothing of a network")
            return
        self.kind = "namespaces"
        if not found.delay and any(link.delay_s for link in self.links):
            self.links = [Link(link.rate) for link in self.links]
            self.notes.append(f"no delay: this kernel has no netem ({found.why_not})")
