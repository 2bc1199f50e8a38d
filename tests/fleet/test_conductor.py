"""What the fleet does with what it hears: on a clock that only counts, with tasks that are nobody's processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_embrace.fleet.carrier import Gone
from lightning_embrace.fleet.conductor import Conductor
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
    Paused,
    Recall,
    Stop,
    Stopped,
)


class Carrier:
    """Keeps what it is told, and says what the test says."""

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.coming: list[tuple[str, Any]] = []

    def start(self, order: Order, device: str | None) -> None:
        self.did.append(("start", order.name, device))

    def send(self, name: str, command: Any) -> None:
        self.did.append((name, command))

    def kill(self, name: str) -> None:
        self.did.append(("kill", name))

    def wait(self, seconds: float) -> list[tuple[str, Any]]:
        coming, self.coming = self.coming, []
        return coming

    def close(self) -> None:
        self.did.append("close")


class Fleet:
    """A conductor, and its surroundings.

    Args:
        folder: For the manifest.
        tasks: Names, a letter each.
        devices: How many.
        seats: How many.
    """

    def __init__(
        self,
        folder: Path,
        tasks: str,
        devices: int = 1,
        seats: int = 2,
        movable: bool = True,
        hang: float | None = 60.0,
        judge: Callable[[], list[str]] = list,
    ) -> None:
        self.now = 0.0
        self.carrier = Carrier()
        self.manifest = Manifest(folder)
        self.manifest.entries = {name: Entry() for name in tasks}
        names = [f"d{n}" for n in range(devices)]
        self.book = LeaseBook(names, "fifo", movable)
        places = [None if movable else names[n % devices] for n in range(seats)]

        def order(name: str) -> Order:
            return Order(name, folder / name, b"", "cpu", 1, 1, None, 1, 0, None, False)

        self.conductor = Conductor(
            tasks, order, self.manifest, self.book, self.carrier, places, hang, judge, lambda: self.now
        )

    def turn(self, *events: tuple[str, Any]) -> list[Any]:
        """Tasks say something; what is done about it."""
        self.now += 0.001  # who gives and asks again has waited for less than who waits
        self.carrier.coming = list(events)
        self.conductor.turn()
        self.conductor.turn()
        done, self.carrier.did = self.carrier.did, []
        return done

    def states(self) -> str:
        return " ".join(f"{name}:{entry.state}" for name, entry in self.manifest.entries.items())


ASK = Ask(Progress())


def test_seats_and_leases(tmp_path: Path) -> None:
    """Tasks start as seats are free; a device changes hands, and is granted again when its holder is no more."""
    fleet = Fleet(tmp_path, "abc")
    assert fleet.turn() == [("start", "a", None), ("start", "b", None)]
    assert fleet.turn(("a", ASK)) == [("a", Grant(1))]
    assert fleet.turn(("b", ASK)) == [("a", Recall(1))]
    assert fleet.turn() == []
    assert fleet.turn(("a", Give(Progress(), again=True))) == [("b", Grant(1)), ("b", Recall(1))]
    assert fleet.conductor.yields == {"a": 1}
    # b has come to its end: it may still compute, until it is gone
    assert fleet.turn(("b", Finished({"x": 1.0}, "p"))) == []
    assert fleet.turn(("b", Gone("its process ended with code 0"))) == [("start", "c", None), ("a", Grant(2))]
    assert fleet.states() == "a:running b:finished c:running"
    assert fleet.manifest.entries["b"].metrics == {"x": 1.0}
    assert Manifest(tmp_path).entries == fleet.manifest.entries
    fleet.turn(("a", Gone("its process ended with code 1")), ("c", Failed("E: no")), ("c", Gone("")))
    assert fleet.conductor.is_over and fleet.states() == "a:failed b:finished c:failed"
    log = tmp_path / "a" / "log.txt"
    assert fleet.manifest.entries["a"].error == f"its process ended with code 1 (after step 0; its log: {log})"
    assert (fleet.manifest.entries["c"].error or "").startswith("E: no (after")


def test_seats_of_their_own(tmp_path: Path) -> None:
    """Where tasks cannot move, one that follows another has its device, and no other."""
    fleet = Fleet(tmp_path, "abcd", devices=2, seats=3, movable=False)
    assert fleet.turn() == [("start", "a", "d0"), ("start", "b", "d1"), ("start", "c", "d0")]
    assert fleet.turn(("a", ASK), ("c", ASK)) == [("a", Grant(1)), ("a", Recall(1))]
    assert fleet.turn(("b", Gone(""))) == [("start", "d", "d1")]


def test_silence(tmp_path: Path) -> None:
    """Ends a task that trains, not one that waits or that has not begun."""
    fleet = Fleet(tmp_path, "abc", seats=3)
    fleet.turn()
    fleet.turn(("a", ASK), ("b", ASK))
    fleet.now = 59.0
    assert ("kill", "a") not in fleet.turn(("a", Beat(Progress())))
    fleet.now = 118.0
    assert fleet.turn() == []
    fleet.now = 120.0
    assert fleet.turn() == [("kill", "a")] and fleet.turn() == []
    assert fleet.turn(("a", Gone("SIGKILL"))) == [("b", Grant(1))]
    assert (fleet.manifest.entries["a"].error or "").startswith("it said nothing for 61 s")
    # b's shards take long
    fleet.turn(("b", Beat(Progress(longest=20.0))))
    fleet.now = 319.0
    assert fleet.turn() == []
    fleet.now = 321.0
    assert fleet.turn() == [("kill", "b")]


def test_silence_without_end(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", hang=None)
    fleet.turn()
    fleet.turn(("a", ASK))
    fleet.now = 1e9
    assert fleet.turn() == []


def test_stop(tmp_path: Path) -> None:
    """No task is started any more; those that live are told once, and go on having devices until they have saved."""
    fleet = Fleet(tmp_path, "abc")
    fleet.turn()
    fleet.turn(("a", ASK))
    fleet.conductor.stop()
    fleet.conductor.stop()
    assert fleet.carrier.did == [("a", Stop()), ("b", Stop())]
    fleet.turn(("a", Stopped()), ("a", Gone("")))
    assert fleet.turn(("b", ASK)) == [("b", Grant(1))]
    fleet.turn(("b", Finished({}, "p")), ("b", Gone("")))
    assert fleet.conductor.is_over and fleet.states() == "a:interrupted b:finished c:waiting"


def test_pauses(tmp_path: Path) -> None:
    """A task that pauses is gone. The judge lets it go on, at the end of the line, but not while the fleet ends."""
    judged: list[list[str]] = [[], ["a"], []]
    fleet = Fleet(tmp_path, "abc", seats=1, judge=lambda: judged.pop(0))
    assert fleet.turn() == [("start", "a", None)]
    assert fleet.turn(("a", Paused(1.5, {"loss": 1.5})), ("a", Gone(""))) == [("start", "b", None)]
    assert fleet.manifest.entries["a"].rungs == [1.5] and fleet.manifest.entries["a"].metrics == {"loss": 1.5}
    assert fleet.turn(("b", Finished({}, "p")), ("b", Gone(""))) == [("start", "c", None)]
    fleet.conductor.stop()
    fleet.turn(("c", Paused(2.0, {})), ("c", Gone("")))
    assert fleet.states() == "a:paused b:finished c:paused" and judged == [] and fleet.conductor.is_over


def test_close(tmp_path: Path) -> None:
    """Whoever lives is ended, and can go on."""
    fleet = Fleet(tmp_path, "ab")
    fleet.turn()
    fleet.conductor.close()
    assert fleet.carrier.did == ["close"] and fleet.states() == "a:interrupted b:interrupted"
    assert [e.attempts for e in fleet.manifest.entries.values()] == [1, 1]


def test_another_programs_manifest(tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_text('{"version": 7}')
    with pytest.raises(ValueError, match="is of version 7, and this program reads version 1"):
        Manifest(tmp_path)
