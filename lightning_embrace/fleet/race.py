"""Successive halving of a fleet's tasks, as its manifest keeps it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_embrace.fleet.halving import Runner, SuccessiveHalving, verdicts
from lightning_embrace.fleet.manifest import Entry, State
from lightning_embrace.fleet.protocol import Pause

_RUNS: tuple[State, ...] = ("waiting", "running", "interrupted")


class Race:
    """Which tasks go on, and how far.

    Args:
        halving: Says how many; None: all go on to their ends.
        entries: Of the manifest; tasks that are to be started are not ``"failed"`` any more.
    """

    def __init__(self, halving: SuccessiveHalving | None, entries: Mapping[str, Entry]) -> None:
        self._halving = halving
        self._entries = entries

    def pause(self, name: str) -> Pause | None:
        """The rung at which a task is to wait; None: it would wait for nobody.

        Args:
            name: The task's.
        """
        others = (e for n, e in self._entries.items() if n != name)
        if self._halving is None or not any(e.state == "paused" or e.state in _RUNS for e in others):
            return None
        at = self._halving.rung(len(self._entries[name].rungs) + 1)
        return Pause(self._halving.monitor, self._halving.unit, at)

    def judge(self) -> Iterable[str]:
        """Writes into the manifest what can be decided.

        Returns:
            Tasks that go on.
        """
        if self._halving is None:
            return []
        go_on: list[str] = []
        while found := verdicts(self._halving, {name: _runner(entry) for name, entry in self._entries.items()}):
            for name, verdict in found.items():
                entry = self._entries[name]
                entry.state = "waiting" if verdict.goes_on else "dropped"
                entry.dropped = None if verdict.goes_on else verdict.why
                go_on += [name] * verdict.goes_on
        return go_on


def _runner(entry: Entry) -> Runner:
    if entry.state in _RUNS:
        return Runner(entry.rungs, "runs")
    if entry.state == "paused":
        return Runner(entry.rungs, "paused")
    return Runner(entry.rungs, "failed" if entry.state == "failed" else "ended")
