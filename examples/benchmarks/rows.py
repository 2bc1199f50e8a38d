"""From measured records to one row per peer and setting. Pure functions."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.benchmarks.job import Job
from examples.benchmarks.peers import PEERS
from examples.benchmarks.rates import parse_rate


@dataclass(frozen=True)
class Setting:
    """What peers are compared on.

    Attributes:
        work: The job, without the peer.
        rate: Of the links, as ``tc`` has it; several by commas.
        delay: The same.
    """

    work: Job
    rate: str = ""
    delay: str = ""

    @property
    def bytes_per_second(self) -> float:
        """Of the slowest link; 0 where none is shaped."""
        rates = [parse_rate(text) for text in self.rate.split(",") if text]
        return min((rate for rate in rates if rate is not None), default=0) / 8

    @property
    def compute(self) -> str:
        """How blocks compute."""
        return f"{self.work.compute_ms:g} ms of emulated compute" if self.work.compute == "emulated" else "real compute"


@dataclass(frozen=True)
class Row:
    """One peer on one setting.

    Attributes:
        job: What was run, the first time.
        setting: What makes it comparable.
        seconds: Quartiles of a step's wall time on rank 0, over all repetitions.
        sent: Bytes per step that leave the busiest rank's link, median over steps; 0 where not measured.
        wire: The same of the busier direction.
        cpu: CPU seconds per step, all ranks together, median.
        memory: Peak resident bytes of the largest rank.
        losses: Mean over ranks, by step.
        counted: Payload bytes sent per step by kind, mean over ranks, where the peer counts them.
        steps: What the peer counted in a step: medians over steps and ranks, the largest rank where it is bytes.
        exposed: Seconds per step in which training stood still for others, from a traced run; None without.
        blocks: Bytes of the parameters of each part that computes.
        notes: What kept the schedule from being carried out.
        error: Why it did not run, "" where it did.
        cores: Of the machine, for all ranks; 0 where not recorded.
    """

    job: Job
    setting: Setting
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    sent: float = 0.0
    wire: float = 0.0
    cpu: float = 0.0
    memory: int = 0
    losses: tuple[float, ...] = ()
    counted: dict[str, float] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    exposed: float | None = None
    blocks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""
    cores: int = 0

    @property
    def idle(self) -> float | None:
        """Share of the machine's cores that the ranks left idle; None where the cores were not recorded."""
        return 1 - self.cpu / (self.cores * self.seconds[1]) if self.cores and self.seconds[1] else None

    @property
    def peer(self) -> str:
        """The adapter's name."""
        return self.job.peer

    @property
    def model(self) -> str:
        """The model's name."""
        return self.job.model

    @property
    def ranks(self) -> int:
        """N."""
        return self.job.ranks

    @property
    def optimizer(self) -> str:
        """The optimizer's name."""
        return self.job.optimizer

    @property
    def label(self) -> str:
        """How tables call it."""
        return ", ".join(part for part in (PEERS[self.peer].label, self.job.wire_dtype) if part)

    @property
    def level(self) -> float:
        """Row and gradient bytes per rank and step × N/(N−1): what must not grow with N."""
        return (self.counted.get("rows", 0.0) + self.counted.get("grads", 0.0)) * self.ranks / (self.ranks - 1)

    def share(self, of: str, other: str) -> float | None:
        """The part of one kind of rows in two."""
        both = self.steps.get(of, 0.0) + self.steps.get(other, 0.0)
        return self.steps.get(of, 0.0) / both if both else None


def summarise(records: Iterable[dict[str, Any]]) -> list[Row]:
    """One row per setting and peer, in the order of first appearance; several runs' records become one table.

    Args:
        records: As ``run.py`` writes them: a job, and by rank what was measured or an error.

    Returns:
        The rows.
    """
    groups: dict[tuple[Setting, str, str], list[tuple[Job, dict[str, Any]]]] = defaultdict(list)
    for record in records:
        job = Job(**record["job"])
        setting = Setting(job.work, record.get("rate", ""), record.get("delay", ""))
        groups[setting, job.peer, job.wire_dtype].append((job, record))
    return [_row(setting, group) for (setting, _, _), group in groups.items()]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, middle, third


def _row(setting: Setting, group: list[tuple[Job, dict[str, Any]]]) -> Row:
    job = group[0][0]
    errors = [r["error"] for _, record in group for r in record["results"] if "error" in r]
    if errors:
        # the first rank's complaint is often "a peer closed the connection": the longest says most
        return Row(job, setting, error=max(errors, key=len))
    timed = [record["results"] for j, record in group if not j.trace] or [record["results"] for _, record in group]
    by_rank = [[s for results in timed for s in results[r]["steps"]] for r in range(job.ranks)]
    together = [
        [result["steps"][k] for result in results] for results in timed for k in range(len(results[0]["steps"]))
    ]
    sent = [statistics.median(s["sent"] for s in steps) for steps in by_rank]
    received = [statistics.median(s["received"] for s in steps) for steps in by_rank]
    traced = [r["about"]["exposed"] for j, record in group if j.trace for r in record["results"]]
    exposed = [seconds for steps in traced for seconds in steps]
    return Row(
        job,
        setting,
        quartiles([s["seconds"] for s in by_rank[0]]),
        max(sent),
        max(*sent, *received),
        statistics.median(sum(s["cpu"] for s in ranks) for ranks in together),
        max(result["peak_rss"] for results in timed for result in results),
        _losses(timed),
        _counted([r["counted"] for r in timed[0] if "counted" in r]),
        _counts(by_rank),
        statistics.median(exposed) if exposed else None,
        tuple(timed[0][0].get("blocks", ())),
        () if PEERS[job.peer].schedule == "fifo" else _notes(timed, by_rank),
        cores=group[0][1].get("cores", 0),
    )


def _losses(timed: list[list[dict[str, Any]]]) -> tuple[float, ...]:
    """By step, of the longest run."""
    longest = max(timed, key=lambda results: len(results[0]["losses"]))
    return tuple(statistics.fmean(values) for values in zip(*(r["losses"] for r in longest)))


def _counted(counts: Sequence[dict[str, Any]]) -> dict[str, float]:
    kinds = {kind for count in counts for kind in count["sent"]}
    return {k: statistics.fmean(c["sent"].get(k, 0) / c["steps"] for c in counts) for k in sorted(kinds)}


def _counts(by_rank: list[list[dict[str, Any]]]) -> dict[str, float]:
    names = {name for steps in by_rank for step in steps for name in step.get("counts", {})}
    found = {}
    for name in sorted(names):
        medians = [statistics.median(s.get("counts", {}).get(name, 0.0) for s in steps) for steps in by_rank]
        found[name] = max(medians) if name.startswith(("sent ", "received ")) else statistics.fmean(medians)
    return found


def _notes(timed: list[list[dict[str, Any]]], by_rank: list[list[dict[str, Any]]]) -> tuple[str, ...]:
    abouts = [r["about"] for results in timed for r in results if "about" in r]
    notes = [f"waits for all gradients, because {a['barrier because']}" for a in abouts if not a["relaxed"]]
    notes += [f"does not look ahead, because {a['blind because']}" for a in abouts if a["blind because"]]
    tables = abouts[0]["tables"] if abouts else 0
    steps = [s["counts"] for steps in by_rank for s in steps if "tables foreseen" in s.get("counts", {})]
    partly = sum(counts["tables foreseen"] < tables for counts in steps)
    if partly and not any(a["blind because"] for a in abouts):
        notes.append(f"rows of all tables were foreseen in {len(steps) - partly} of {len(steps)} steps only")
    return tuple(dict.fromkeys(notes))
