"""Throughput of fleets: models that take turns shard by shard beside whole models, and beside plain training.

    python examples/benchmarks/fleet_throughput.py --repetitions 5

prints a Markdown table for each comparison. A device's memory is a third of a model's parameters, and tasks that share
a device share it. What is compared takes turns, in fresh processes, and ratios are those of one turn. All tasks begin
at the same time, when their processes have started. Blocks that sleep stand for accelerators: with them more devices
than cores can be busy.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.benchmarks.fleet_job import Model, start_plain  # noqa: E402
from lightning_embrace import HydraFleet  # noqa: E402
from lightning_embrace.fleet.gantt import idle_shares  # noqa: E402

#: batches before those that count, where all tasks have a device from the beginning: one is measured, one begins with
#: a new plan
WARMUP = 2


@dataclass(frozen=True)
class Row:
    """What is measured.

    Attributes:
        name: In the table.
        models: How many.
        devices: How many; 0: each model in a plain process.
        policy: The fleet's.
        live: Tasks that are live at a time.
        threads: Of each.
        memory: Of a device, as a share of a model's parameters.
        one_by_one: Models follow each other, and the time between them does not count.
    """

    name: str
    models: int
    devices: int
    policy: str = "lrtf"
    live: int | None = None
    threads: int = 1
    memory: float = 1 / 3
    one_by_one: bool = False


@dataclass(frozen=True)
class Found:
    """What was found.

    Attributes:
        rate: Batches a second, of all models together.
        idle: Share of the devices' time that nobody had; None: there were no leases.
        losses: Of each model.
    """

    rate: float
    idle: float | None
    losses: list[list[float]]


def packing(models: int, devices: int, threads: int = 1) -> list[Row]:
    """Shards beside whole models; the first row is what others are held against.

    Args:
        models: Half as many again as devices, for which the bound is 4/3.
        devices: How many.
        threads: Of each task.
    """
    return [
        Row("whole models (`task`)", models, devices, "task", models, threads),
        Row("shards (`lrtf`)", models, devices, "lrtf", models, threads),
    ]


def comparisons(threads: int) -> dict[str, tuple[list[Row], bool, int]]:
    """By title: rows, whether blocks sleep, and the batches that do not count."""
    other = [
        Row("whole models, each with a whole device, the third one's start included", 3, 2, "task", 2, threads),
        Row("one model at a time, all cores, both devices' memory", 3, 1, "task", 1, 2 * threads, 2 / 3, True),
    ]
    pairs = [
        Row("two plain trainings side by side", 2, 0, threads=threads),
        Row("two tasks on two devices, all fits", 2, 2, threads=threads, memory=100.0),
        Row("two tasks on two devices, a third of a model each", 2, 2, threads=threads),
    ]
    return {
        "3 GPTs on 2 devices": ([*packing(3, 2, threads), *other], False, 0),
        "2 GPTs on 2 devices": (pairs, False, WARMUP),
        "6 models on 4 devices, emulated compute": (packing(6, 4), True, 0),
        "12 models on 8 devices, emulated compute": (packing(12, 8), True, 0),
    }


def measure(row: Row, model: Model, skip: int = 0) -> Found:
    """Trains, in processes of their own.

    Args:
        row: What with.
        model: What each of them is.
        skip: Batches of each that do not count.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = [f"model {n}" for n in range(row.models)]
        idle = None
        if row.devices:
            idle = _train_fleet(row, model, names, folder)
        else:
            start_plain(model, names, row.threads, folder)
        notes = [json.loads((folder / "notes" / name).read_text()) for name in names]
    return Found(rate_of(notes, skip, row.one_by_one), idle, [note["losses"] for note in notes])


def _train_fleet(row: Row, model: Model, names: list[str], folder: Path) -> float:
    together = 1 if row.one_by_one else min(row.models, row.live or row.models)
    fleet = HydraFleet(
        [model.task(name, folder / "notes", folder / "begin", together) for name in names],
        devices=row.devices,
        memory=int(row.memory * model.nbytes),
        policy=row.policy,
        threads=row.threads,
        max_live=row.live,
        folder=folder / "fleet",
        progress=False,
    )
    with redirect_stdout(sys.stderr):
        errors = [result.error for result in fleet.fit() if result.error is not None]
    if errors:
        raise RuntimeError(f"{row.name}: {errors[0]}")
    shares = idle_shares(fleet.leases, fleet.config.names)
    return sum(shares.values()) / len(shares)


def rate_of(notes: Sequence[dict[str, Any]], skip: int, one_by_one: bool) -> float:
    """Batches a second, of all together.

    Args:
        notes: When each model's batches began and ended.
        skip: Batches of each that do not count.
        one_by_one: Time between models does not count.
    """
    spans = [(note["began"][skip], note["ended"][-1]) for note in notes]
    count = sum(len(note["ended"]) - skip for note in notes)
    if one_by_one:
        return count / sum(end - begin for begin, end in spans)
    return count / (max(end for _, end in spans) - min(begin for begin, _ in spans))


def markdown(title: str, rows: Sequence[Row], found: dict[Row, list[Found]]) -> str:
    """A comparison as a table.

    Args:
        title: Its.
        rows: All are held against the first one.
        found: By row, one for each turn.
    """
    lines = [
        f"**{title}**",
        "",
        "| | batches/s | beside the first row | devices idle | losses |",
        "|---|---:|---:|---:|---|",
    ]
    first = found[rows[0]]
    for row in rows:
        turns = found[row]
        rates = [turn.rate for turn in turns]
        ratio = median(turn.rate / base.rate for turn, base in zip(turns, first))
        idle = [turn.idle for turn in turns if turn.idle is not None]
        equal = all(turn.losses == [first[0].losses[0]] * row.models for turn in turns)
        same = "equal" if equal else "other threads" if row.threads != rows[0].threads else "**not equal**"
        spread = f"{median(rates):.2f} ({min(rates):.2f}–{max(rates):.2f})"
        share = f"{median(idle):.0%}" if idle else "–"
        lines.append(f"| {row.name} | {spread} | {ratio:.2f}× | {share} | {same} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3, help="turns (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="batches of each model (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of a device (default: %(default)s)")
    parser.add_argument("--only", default="", help="comparisons whose titles have this word")
    parser.add_argument("--quick", action="store_true", help="small models, one turn: whether it runs, not how fast")
    chosen = parser.parse_args(arguments)
    gpt, sleeping = Model(steps=chosen.steps), Model(dim=128, layers=24, steps=chosen.steps, sleep=0.005)
    if chosen.quick:
        chosen.repetitions = 1
        gpt = replace(gpt, dim=64, layers=40, vocabulary=100, length=16, sequences=2, steps=4)
        sleeping = replace(sleeping, dim=32, steps=4, sleep=0.001)
    for title, (rows, sleeps, skip) in comparisons(chosen.threads).items():
        if chosen.only not in title:
            continue
        found: dict[Row, list[Found]] = {row: [] for row in rows}
        for turn in range(chosen.repetitions):
            for row in rows:
                found[row].append(measure(row, sleeping if sleeps else gpt, skip))
                print(f"{title}, turn {turn + 1}: {row.name}: {found[row][-1].rate:.2f}", file=sys.stderr, flush=True)
        print(markdown(title, rows, found), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
