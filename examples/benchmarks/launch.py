"""Starts one process per rank of a cluster and sees to it that none outlives the run."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from examples.benchmarks import host
from examples.benchmarks.counters import LINK_VARIABLE
from examples.benchmarks.emulated import Cluster
from examples.benchmarks.starting import Process, Start, Starter, anew

Layout = Literal["nodes", "local"]
# Another launcher's view of the job must not reach the ranks.
_FOREIGN = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "HOROVOD_", "GROUP_RANK", "LOCAL_WORLD_SIZE")
_PORT = 29500
_POLL_S = 0.02
_PEER_GRACE_S = 10.0
_run = itertools.count()


@dataclass(frozen=True)
class RankResult:
    """How one rank ended.

    Attributes:
        rank: Which one.
        returncode: Its exit status; negative: the signal that ended it.
        stdout: File with what it printed. The cluster takes it along, unless a folder was given.
        stderr: The same for errors.
        ended: ``"itself"``; ``"timeout"``: killed when time was up; ``"peer"``: killed since another one failed.
    """

    rank: int
    returncode: int
    stdout: Path
    stderr: Path
    ended: Literal["itself", "timeout", "peer"]

    def describe(self, lines: int = 15) -> str:
        """How it ended, with the last lines of its errors."""
        tail = self.stderr.read_text(errors="replace").splitlines()[-lines:] if lines else []
        why = {"itself": "", "timeout": " (killed: time was up)", "peer": " (killed: another rank failed)"}[self.ended]
        return "\n".join([f"rank {self.rank}: exit status {self.returncode}{why}", *tail])


class RanksFailed(RuntimeError):
    """Not all ranks ended well; the message holds each that did not, those that failed by themselves first."""


def run_ranks(
    cluster: Cluster,
    command: Sequence[str] | Sequence[Sequence[str]],
    env_per_rank: Sequence[Mapping[str, str]] | None = None,
    timeout: float = 300.0,
    *,
    layout: Layout = "nodes",
    folder: Path | None = None,
    cwd: Path | None = None,
    start: Starter = anew,
) -> list[RankResult]:
    """Runs ``command`` once per rank and waits for all. No process of the run is left when it returns or raises.

    The environment is that of N nodes × 1 device, or of one node × N devices, already launched: torch's ``env://`` and
    a Lightning Trainer find their rank and the way to rank 0. When a rank fails, the others have ten seconds to notice.
    One run at a time per cluster.

    Args:
        cluster: Where; its block must be entered.
        command: Program and arguments, or one such list for each rank.
        env_per_rank: Added to the environment, one mapping for each rank.
        timeout: Seconds after which all ranks are killed.
        layout: ``"nodes"`` for ``Trainer(num_nodes=N, devices=1)``, ``"local"`` for ``Trainer(devices=N)``.
        folder: Where output files go; default: the cluster's folder.
        cwd: Where the ranks run; default: where this process does.
        start: What starts a rank; default: a new program each.

    Returns:
        How each rank ended.
    """
    commands = _for_each_rank(command, cluster.ranks)
    extra = env_per_rank if env_per_rank is not None else [{}] * cluster.ranks
    if len(extra) != cluster.ranks:
        raise ValueError(f"{cluster.ranks} ranks but {len(extra)} environments. Give one mapping per rank.")
    number = next(_run)
    folder = folder or cluster.folder / f"run{number}"
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port() if cluster.kind == "loopback" else _PORT + number % 1000
    processes: list[Process] = []
    try:
        for rank in range(cluster.ranks):
            environment = rank_environment(cluster, rank, port, layout) | dict(extra[rank])
            files = _files(folder, rank)
            processes.append(start(Start(commands[rank], environment, *files, cluster.namespace(rank), cwd)))
        ended = _wait(processes, timeout)
    finally:
        for process in processes:
            process.kill()  # nothing where it has ended
        host.kill_members(cluster.names)
        for process in processes:
            process.wait()
    return [RankResult(r, p.returncode, *_files(folder, r), ended[r]) for r, p in enumerate(processes)]


def check(results: Sequence[RankResult]) -> None:
    """Raises :class:`RanksFailed` unless every rank ended by itself with status 0."""
    failed = [result for result in results if result.returncode != 0 or result.ended != "itself"]
    if failed:
        failed.sort(key=lambda result: result.ended != "itself")
        raise RanksFailed("\n".join(result.describe() for result in failed))


def own_environment() -> dict[str, str]:
    """This process' environment without what another launcher said."""
    return {name: value for name, value in os.environ.items() if not name.startswith((*_FOREIGN, LINK_VARIABLE))}


def rank_environment(cluster: Cluster, rank: int, port: int, layout: Layout) -> dict[str, str]:
    """The environment of a rank: this process' own, and the rank's place."""
    own = own_environment()
    if cluster.kind == "namespaces":
        own[LINK_VARIABLE] = cluster.interface
    return own | {
        "MASTER_ADDR": cluster.main_address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(cluster.ranks),
        "RANK": str(rank),
        "NODE_RANK": str(rank) if layout == "nodes" else "0",
        "LOCAL_RANK": "0" if layout == "nodes" else str(rank),
        # By itself gloo takes the interface that the host name leads to, which is not the rank's link.
        "GLOO_SOCKET_IFNAME": cluster.interface,
        "TP_SOCKET_IFNAME": cluster.interface,
        host.MARK: cluster.names.cluster,
    }


def _for_each_rank(command: Sequence[str] | Sequence[Sequence[str]], ranks: int) -> list[list[str]]:
    words = [word for word in command if isinstance(word, str)]
    if words and len(words) == len(command):
        return [words] * ranks
    commands = [list(own) for own in command]
    if words or len(commands) != ranks:
        raise ValueError(f"{ranks} ranks but got {command!r}. Give one list of words for all, or one for each rank.")
    return commands


def _files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank{rank}.out", folder / f"rank{rank}.err"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _wait(processes: list[Process], timeout: float) -> list[Literal["itself", "timeout", "peer"]]:
    """Waits until all have ended, or must be ended; says for each which."""
    deadline = time.monotonic() + timeout
    cause: Literal["timeout", "peer"] = "timeout"
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
        if cause == "timeout" and any(codes):
            until = time.monotonic() + _PEER_GRACE_S
            if until < deadline:
                cause, deadline = "peer", until
        time.sleep(_POLL_S)
    return ["itself" if code is not None else cause for code in codes]
