"""How a fleet stands, to be shown: a row for each task and one for each device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_embrace.fleet.conductor import Live
from lightning_embrace.fleet.lease import LeaseBook
from lightning_embrace.fleet.manifest import Entry
from lightning_embrace.fleet.results import logged


@dataclass(frozen=True)
class TaskRow:
    """A task.

    Attributes:
        name: The task's.
        state: As the manifest says it.
        now: The same, and of one that has a process what it does.
        step: Of the optimizer; None: it has not begun.
        loss: Of its last batch, or None.
        share: Of all device time until now, from 0 to 1.
        remaining: Seconds of computing that are left; ``inf``: not known; None: it has no process.
        note: What it has logged last, or why it has failed; empty until it has ended.
    """

    name: str
    state: str
    now: str
    step: int | None
    loss: float | None
    share: float
    remaining: float | None
    note: str


@dataclass(frozen=True)
class DeviceRow:
    """A device.

    Attributes:
        name: The device's.
        task: Who has it, or None.
        idle: Share of time in which nobody had it, from the first lease on, from 0 to 1.
    """

    name: str
    task: str | None
    idle: float


@dataclass(frozen=True)
class Board:
    """A fleet at a time.

    Attributes:
        tasks: In their order.
        devices: In theirs.
        seconds: Since the first look.
    """

    tasks: tuple[TaskRow, ...]
    devices: tuple[DeviceRow, ...]
    seconds: float


class Usage:
    """Who has had how much of which device. Each lease is added up once, however many there are.

    Args:
        book: Whose leases.
    """

    def __init__(self, book: LeaseBook) -> None:
        self._book = book
        self._counted = 0
        self._begin, self._end = math.inf, 0.0
        self._tasks: defaultdict[str, float] = defaultdict(float)
        self._devices: defaultdict[str, float] = defaultdict(float)

    def shares(self, now: float) -> tuple[dict[str, float], dict[str, float]]:
        """Of all device time from the first lease until now, or, where nobody has a device, until the last one's end.

        Args:
            now: Seconds, on the book's clock.

        Returns:
            By task the share of all devices' time that it had; by device the share that nobody had.
        """
        for lease in self._book.leases[self._counted :]:
            self._begin, self._end = min(self._begin, lease.start), max(self._end, lease.end)
            self._tasks[lease.task] += lease.end - lease.start
            self._devices[lease.device] += lease.end - lease.start
        self._counted = len(self._book.leases)
        running = self._book.running(now)
        tasks, devices = dict(self._tasks), dict(self._devices)
        for lease in running:
            tasks[lease.task] = tasks.get(lease.task, 0.0) + lease.end - lease.start
            devices[lease.device] = devices.get(lease.device, 0.0) + lease.end - lease.start
        begin, end = min([self._begin, *(s.start for s in running)]), now if running else self._end
        if end <= begin:
            return {}, dict.fromkeys(self._book.devices, 0.0)
        whole, names = end - begin, self._book.devices
        return (
            {task: seconds / whole / len(names) for task, seconds in tasks.items()},
            {name: max(0.0, 1.0 - devices.get(name, 0.0) / whole) for name in names},
        )


class Scorer:
    """Looks at a fleet.

    Args:
        entries: Of its manifest.
        live: The conductor's.
        book: Who has which device.
        now: When the first look is.
    """

    def __init__(self, entries: Mapping[str, Entry], live: Mapping[str, Live], book: LeaseBook, now: float) -> None:
        self._entries = entries
        self._live = live
        self._book = book
        self._usage = Usage(book)
        self._began = now

    def board(self, now: float) -> Board:
        """How it stands.

        Args:
            now: Seconds, on the book's clock.
        """
        shares, idle = self._usage.shares(now)
        holders = self._book.holders
        places = {task: device for device, task in holders.items()}
        return Board(
            tuple(self._row(name, shares.get(name, 0.0), places.get(name)) for name in self._entries),
            tuple(DeviceRow(device, holders.get(device), idle[device]) for device in self._book.devices),
            now - self._began,
        )

    def _row(self, name: str, share: float, device: str | None) -> TaskRow:
        entry, live = self._entries[name], self._live.get(name)
        if live is None:
            step = entry.step or None
            return TaskRow(name, entry.state, entry.state, step, entry.loss, share, None, note_of(entry))
        progress = live.progress
        if not live.trains:
            return TaskRow(name, entry.state, "starts", entry.step or None, entry.loss, share, progress.remaining, "")
        now = f"on {device}" if device else "waits for device" if live.waits else "between batches"
        return TaskRow(name, entry.state, now, progress.step, progress.loss, share, progress.remaining, "")


def note_of(entry: Entry) -> str:
    """What there is to say of a task that has ended.

    Args:
        entry: Its.
    """
    if entry.error is not None:
        return entry.error
    metrics = logged(entry.metrics)
    return ", ".join([entry.dropped, *metrics] if entry.dropped else metrics)
