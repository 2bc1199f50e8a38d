"""Carries out what the lease book decides: starts tasks, grants devices, and takes note of what becomes of tasks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from lightning_embrace.fleet.carrier import Carrier, Gone
from lightning_embrace.fleet.layout import LOG
from lightning_embrace.fleet.lease import Grant as Granted
from lightning_embrace.fleet.lease import LeaseBook
from lightning_embrace.fleet.manifest import Entry, Manifest
from lightning_embrace.fleet.pace import Progress
from lightning_embrace.fleet.protocol import (
    Ask,
    Beat,
    Failed,
    Finished,
    Give,
    Grant,
    Order,
    Outcome,
    Paused,
    Recall,
    Report,
    Stop,
    Stopped,
)

#: seconds after which silence, signals and seats are looked at again
_TICK = 0.25
#: a shard may take so many times as long as the longest one until now
_SLOWER = 10.0


@dataclass
class Live:
    """A task that has a process.

    Attributes:
        device: Its seat's, where it cannot compute elsewhere; None: anywhere.
        heard: When it said something last.
        progress: What it said.
        trains: It has asked for a device once.
        waits: It asks for one now.
        grants: How many it has had.
        outcome: What it says has become of it.
        killed: Why the fleet has ended it.
    """

    device: str | None
    heard: float
    progress: Progress = field(default_factory=Progress)
    trains: bool = False
    waits: bool = False
    grants: int = 0
    outcome: Outcome | None = None
    killed: str | None = None


class Conductor:
    """A fleet at work.

    Args:
        waiting: Names of the tasks that are to be started, in this order.
        order: Makes a task's order when it is started: a model may be large.
        manifest: Has an entry for each of them.
        book: Who has which device.
        carrier: Starts them.
        seats: The device of each seat; None: any. There are as many live tasks at most.
        hang_limit: Seconds of silence after which a task that trains hangs; None: it may be silent for ever.
        judge: Says which paused tasks are to go on now.
        clock: Gives seconds.
    """

    def __init__(
        self,
        waiting: Iterable[str],
        order: Callable[[str], Order],
        manifest: Manifest,
        book: LeaseBook,
        carrier: Carrier,
        seats: Iterable[str | None],
        hang_limit: float | None,
        judge: Callable[[], Iterable[str]] = tuple,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._waiting = deque((*waiting, *judge()))
        self._order = order
        self._manifest = manifest
        self._book = book
        self._carrier = carrier
        self._seats = deque(seats)
        self._hang_limit = hang_limit
        self._judge = judge
        self._clock = clock
        self._folders: dict[str, Path] = {}
        self._stopping = False
        #: tasks that have a process
        self.live: dict[str, Live] = {}
        #: how often each task gave its device away amid a batch
        self.yields: Counter[str] = Counter()

    @property
    def is_over(self) -> bool:
        """Nobody is left."""
        return not self.live and (self._stopping or not self._waiting)

    def turn(self) -> None:
        """Starts, grants, and listens for a while."""
        while self._seats and self._waiting and not self._stopping:
            self._start(self._waiting.popleft(), self._seats.popleft())
        self._decide()
        for name, event in self._carrier.wait(_TICK):
            self._hear(name, event)
        self._end_silent()

    def stop(self) -> None:
        """Tells all tasks to save and to end, and starts no more."""
        if not self._stopping:
            self._stopping = True
            for name in self.live:
                self._carrier.send(name, Stop())

    def close(self) -> None:
        """Ends all processes that are left."""
        self._stopping = True
        self._carrier.close()
        for name in list(self.live):
            self._bury(name, "the fleet was ended before it")

    # ---- devices -----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        for action in self._book.due(self._clock()):
            live = self.live[action.task]
            if isinstance(action, Granted):
                live.grants += 1
                live.waits, live.heard = False, self._clock()
                self._carrier.send(action.task, Grant(live.grants))
            else:
                self._carrier.send(action.task, Recall(live.grants))

    def _hear(self, name: str, event: Report | Gone) -> None:
        live, now = self.live[name], self._clock()
        if isinstance(event, Gone):
            self._bury(name, event.ending)
            return
        live.heard = now
        if isinstance(event, (Ask, Give, Beat)):
            live.progress = event.progress
            self._book.report(name, event.progress.remaining, event.progress.unit, now)
        else:
            live.outcome = event
        if isinstance(event, Give):
            self._book.give(name, now)
            self.yields[name] += event.again
        if isinstance(event, Ask) or (isinstance(event, Give) and event.again):
            live.trains = live.waits = True
            self._book.ask(name, now)

    def _end_silent(self) -> None:
        """A task that waits for a device may be silent, and so may one that has not begun to train."""
        if self._hang_limit is None:
            return
        for name, live in self.live.items():
            limit = max(self._hang_limit, _SLOWER * live.progress.longest)
            silent = self._clock() - live.heard
            if live.trains and not live.waits and silent > limit and live.killed is None:
                live.killed = (
                    f"it said nothing for {silent:.0f} s, and HydraFleet(hang_limit=...) allows {limit:.0f} s: it was"
                    " ended"
                )
                self._carrier.kill(name)

    # ---- tasks -------------------------------------------------------------------------------------------------------

    def _start(self, name: str, device: str | None) -> None:
        order, now = self._order(name), self._clock()
        entry = self._manifest.entries[name]
        entry.state, entry.error, entry.attempts = "running", None, entry.attempts + 1
        self._manifest.write()
        order.folder.mkdir(parents=True, exist_ok=True)
        self._folders[name] = order.folder
        self._carrier.start(order, device)
        self.live[name] = Live(device, now)
        self._book.join(name, remaining=Progress().remaining, unit=Progress().unit, device=device, now=now)

    def _bury(self, name: str, ending: str) -> None:
        """Its process is gone, and so its device may be another's."""
        live = self.live.pop(name)
        self._book.leave(name, self._clock())
        self._seats.append(live.device)
        self._enter(self._manifest.entries[name], live, ending, self._folders[name] / LOG)
        if not self._stopping:
            self._waiting.extend(self._judge())
        self._manifest.write()

    def _enter(self, entry: Entry, live: Live, ending: str, log: Path) -> None:
        outcome = live.outcome
        if live.trains:
            entry.step, entry.loss = live.progress.step, live.progress.loss
        if isinstance(outcome, Finished):
            entry.state, entry.metrics = "finished", dict(outcome.metrics)
        elif isinstance(outcome, Paused):
            entry.state, entry.metrics = "paused", dict(outcome.metrics)
            entry.rungs.append(outcome.score)
        elif isinstance(outcome, Stopped) or (self._stopping and outcome is None):
            entry.state = "interrupted"
        else:
            what = outcome.error if isinstance(outcome, Failed) else live.killed or ending
            entry.state, entry.error = "failed", f"{what} (after step {live.progress.step}; its log: {log})"
