"""HydraFleet: many models, trained side by side on devices that each of them may be larger than."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import cloudpickle

from lightning_embrace.fleet.board import Scorer
from lightning_embrace.fleet.conductor import Conductor
from lightning_embrace.fleet.config import FleetConfig, Shares
from lightning_embrace.fleet.display import Watch, display_for
from lightning_embrace.fleet.gantt import write_gantt
from lightning_embrace.fleet.halving import SuccessiveHalving
from lightning_embrace.fleet.layout import CHECKPOINT
from lightning_embrace.fleet.lease import Lease, LeaseBook
from lightning_embrace.fleet.manifest import NAME, Entry, Manifest, alone_in
from lightning_embrace.fleet.process import ProcessCarrier
from lightning_embrace.fleet.protocol import Order, Pause
from lightning_embrace.fleet.race import Race
from lightning_embrace.fleet.stopping import StopSignals
from lightning_embrace.fleet.task import Task, TaskResult, named


class HydraFleet:
    """Trains many models on a few devices, each under ``hydra`` in a process of its own, with plain training's numbers.

    Tasks take turns on the devices shard by shard. A task that fails hurts no other one.

    Args:
        tasks: What is trained. Names are different.
        devices: How many. On the CPU they are shares of the machine: that many tasks compute at a time.
        memory: Of one device, all its tasks together, such as ``"4GiB"``.
        host_memory: For what waits in host memory, all tasks together; by default 50 % of what this process may use.
        disk: A folder for what does not fit the host, or None.
        policy: Whose turn it is. ``"lrtf"``: the task that has the most to do; ``"fifo"``: the one that has waited
            longest; ``"random"``; ``"task"``: a task keeps its device to its end.
        threads: Of each task, to its end, which its numbers depend on; by default the cores divided by the devices.
        max_live: Tasks that have a process at a time; by default two for each device, or all if there are no more
            tasks than devices. They share the devices' memory.
        max_wait: Seconds after which a task that waits goes before all others; None: whatever the policy says.
        hang_limit: Seconds of silence after which a task that trains is ended, or ten times its longest shard if that
            is longer; None: never.
        folder: For ``fleet.json``, ``gantt.json`` and ``gantt.png`` (who had which device when; the picture where
            matplotlib is installed), and a folder for each task with its log, its checkpoint and its loggers.
        checkpoint_every: Optimizer steps between two checkpoints of a task; None: one at the end of each epoch.
        halving: Lets the best tasks go on, and ends the others early; None: all go on.
        progress: Show a table of tasks and devices, in a terminal or a notebook. False, and elsewhere: lines.
        accelerator: ``"cpu"`` or ``"cuda"``.
        seed: Each task's process begins with ``seed_everything(seed)``. Also of the policy ``"random"``.

    Raises:
        ValueError: An argument has a value that is not allowed, or tasks are named alike.
        TypeError: A task cannot be sent to a process of its own.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        devices: int = 2,
        memory: int | str = "4GiB",
        host_memory: int | str | None = None,
        disk: str | Path | None = None,
        policy: str = "lrtf",
        threads: int | None = None,
        max_live: int | None = None,
        max_wait: float | None = None,
        hang_limit: float | None = 300.0,
        folder: str | Path = "fleet",
        checkpoint_every: int | None = None,
        halving: SuccessiveHalving | None = None,
        progress: bool = True,
        accelerator: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.config = FleetConfig.checked(
            devices,
            memory,
            host_memory,
            disk,
            policy,
            threads,
            max_live,
            max_wait,
            hang_limit,
            folder,
            checkpoint_every,
            accelerator,
            seed,
        )
        self.tasks = named(tasks)
        self.halving = halving
        self.progress = progress
        #: who had which device when, in the last fit
        self.leases: list[Lease] = []
        #: how often each task gave its device away amid a batch, in the last fit
        self.yields: Counter[str] = Counter()

    def fit(self, resume: bool = False) -> list[TaskResult]:
        """Trains all tasks.

        Args:
            resume: Go on with what is in the folder: finished tasks keep their results and so do those that halving has
                ended; those that failed or were interrupted go on from their last checkpoints, the others begin.

        Returns:
            In the order of the tasks.

        Raises:
            ValueError: The folder has a fleet already, and ``resume`` is not set.
            KeyboardInterrupt: Ctrl-C or SIGTERM came. Tasks have saved at the end of their batch, and ``resume=True``
                goes on; after a second one, from the checkpoints that there were.
        """
        folder = self.config.folder
        with alone_in(folder):
            manifest = Manifest(folder)
            if manifest.entries and not resume:
                raise ValueError(
                    f"HydraFleet(folder={str(folder)!r}) has the tasks of a fleet already ({NAME}). Write"
                    " fit(resume=True), or --resume, to go on with them, or give another folder."
                )
            for name in self.tasks:
                manifest.entries.setdefault(name, Entry())
            self._conduct(manifest)
            return [self._result(name, manifest.entries[name]) for name in self.tasks]

    def _conduct(self, manifest: Manifest) -> None:
        config = self.config
        self.leases, self.yields = [], Counter()
        own = {name: manifest.entries[name] for name in self.tasks}
        ended = ("finished", "dropped")
        unfinished = [name for name, entry in own.items() if entry.state not in ended]
        if not unfinished:
            return
        waiting = [name for name in unfinished if self.halving is None or own[name].state != "paused"]
        for name in waiting:
            own[name].state = "waiting"
        race = Race(self.halving, own)
        shares = config.shares(len(unfinished))
        book = LeaseBook(config.names, config.policy, config.movable, config.max_wait, config.seed)
        conductor = Conductor(
            waiting,
            lambda name: self._order(name, own[name], shares, race.pause(name)),
            manifest,
            book,
            ProcessCarrier(),
            shares.seats,
            config.hang_limit,
            race.judge,
        )
        watch = Watch(Scorer(own, conductor.live, book, monotonic()).board, display_for(self.progress))
        with StopSignals() as signals:
            try:
                while not conductor.is_over and signals.count < 2:
                    watch.look()
                    conductor.turn()
                    if signals.count:
                        conductor.stop()
            finally:
                conductor.close()
                watch.close()
                self.leases, self.yields = book.leases, conductor.yields
                write_gantt(self.leases, book.devices, config.folder)
        if signals.count:
            raise KeyboardInterrupt(
                f"the fleet was interrupted; HydraFleet(...).fit(resume=True) goes on in {config.folder}"
            )

    def _order(self, name: str, entry: Entry, shares: Shares, pause: Pause | None) -> Order:
        config = self.config
        return Order(
            name=name,
            folder=config.folder / name,
            job=cloudpickle.dumps(self.tasks[name].job),
            accelerator=config.accelerator,
            device_memory=shares.device_memory,
            host_memory=shares.host_memory,
            disk=config.disk,
            threads=shares.threads,
            seed=config.seed,
            checkpoint_every=config.checkpoint_every,
            goes_on=entry.attempts > 0,
            pause=pause,
        )

    def _result(self, name: str, entry: Entry) -> TaskResult:
        path = self.config.folder / name / CHECKPOINT
        checkpoint = str(path) if path.exists() else None
        return TaskResult(name, dict(entry.metrics), checkpoint, entry.error, entry.dropped)
