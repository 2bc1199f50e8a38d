"""Who had which device when, as numbers and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_embrace.checkpoint.atomic import written_whole
from lightning_embrace.fleet.lease import Lease

#: in a fleet's folder
NUMBERS, PICTURE = "gantt.json", "gantt.png"


def from_zero(leases: Sequence[Lease]) -> list[Lease]:
    """The same leases on a clock that begins with the first one.

    Args:
        leases: Of one fit, in any order. Seconds.

    Returns:
        In the order in which they began.
    """
    begin = min((lease.start for lease in leases), default=0.0)
    moved = [Lease(lease.task, lease.device, lease.start - begin, lease.end - begin) for lease in leases]
    return sorted(moved, key=lambda lease: (lease.start, lease.device))


def idle_shares(leases: Sequence[Lease], devices: Sequence[str]) -> dict[str, float]:
    """By device the share of time, from the first lease's start to the last one's end, in which nobody had it.

    Args:
        leases: Of one fit. Those of a device do not overlap.
        devices: All of the fleet's.

    Returns:
        From 0 to 1; 0 where there was no time at all.
    """
    whole = max((lease.end for lease in leases), default=0.0) - min((lease.start for lease in leases), default=0.0)
    used = dict.fromkeys(devices, 0.0)
    for lease in leases:
        used[lease.device] += lease.end - lease.start
    return {device: max(0.0, 1 - seconds / whole) if whole else 0.0 for device, seconds in used.items()}


def write_gantt(leases: Sequence[Lease], devices: Sequence[str], folder: Path) -> None:
    """Writes ``gantt.json`` and, where matplotlib is installed, ``gantt.png``.

    Args:
        leases: Of one fit.
        devices: All of the fleet's.
        folder: The fleet's.
    """
    shifted = from_zero(leases)
    content = {
        "idle": idle_shares(leases, devices),
        "leases": [{"task": s.task, "device": s.device, "start": s.start, "end": s.end} for s in shifted],
    }
    with written_whole(str(folder / NUMBERS)) as file:
        file.write(json.dumps(content, indent=1).encode())
    if shifted:
        _draw(shifted, devices, folder / PICTURE)


def _draw(leases: Sequence[Lease], devices: Sequence[str], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:  # a picture is no reason for a fleet to fail: the numbers are there
        return
    tasks = list(dict.fromkeys(lease.task for lease in leases))
    colours = {task: f"C{index % 10}" for index, task in enumerate(tasks)}
    rows = {device: index for index, device in enumerate(devices)}
    figure = Figure(figsize=(10, 1.2 + 0.5 * len(devices)), layout="constrained")
    axes: Any = figure.add_subplot()
    for task in tasks:
        own = [lease for lease in leases if lease.task == task]
        axes.barh(
            [rows[lease.device] for lease in own],
            [lease.end - lease.start for lease in own],
            left=[lease.start for lease in own],
            color=colours[task],
            label=task,
        )
    idle = idle_shares(leases, devices)
    axes.set_yticks(list(rows.values()), [f"{device} ({idle[device]:.0%} idle)" for device in devices])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    if len(tasks) <= 20:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    FigureCanvasAgg(figure).print_figure(path)
