"""Kills ranks at random moments over saving, loading and training, and looks at what is left.

    python -m tests.faults.campaign --kills 60 --seed 1

A story begins in an empty folder: a run is killed, what it has saved is compared with what an undisturbed run saves,
another run goes on from the last whole checkpoint and is killed, and so on; the last one comes to the end, which is
compared too.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_embrace.checkpoint.agreement import CheckpointError
from lightning_embrace.checkpoint.consolidate import consolidate
from lightning_embrace.checkpoint.damage import check_content, check_file
from tests.faults.goes_on import EVERY, STEPS, run
from tests.faults.victim import Harm
from tests.faults.world import World, in_sessions
from tests.support.lifecycle import assert_same

N = 3
FORMATS = ("full", "sharded")
#: what a rank is killed in; "write" is a part of "save"
PHASES = ("save", "write", "load", "train")
#: seconds after which a rank that has not ended hangs; on a machine at rest a run takes a few
LIMIT = 300.0
NOBODY = Harm("train", "none", -1)
#: tensors of which every rank stores a part: two tables with two states each
SHARED = 6


class Reference(NamedTuple):
    """What an undisturbed run saves, and how long it takes for what.

    Attributes:
        kind: The format.
        states: Weights and optimizer states by step.
        moments: What rank 0 has told, in order: moment and time.
    """

    kind: str
    states: dict[int, Any]
    moments: list[tuple[str, float]]

    @classmethod
    def make(cls, kind: str, folder: Path) -> Reference:
        """Runs it."""
        (folder / "outputs").mkdir(parents=True)
        marks = folder / "marks"
        harm = Harm("train", "none", 0)
        world = World(folder / "outputs", N, functools.partial(run, folder, harm, N, kind, marks=str(marks)))
        for end in world.ends():
            assert end.code == 0, end.output
        states = {state["global_step"]: state for state in map(read, folder.glob("step=*.ckpt"))}
        assert max(states) == STEPS, states.keys()
        lines = [line.split() for line in marks.read_text().splitlines()]
        return cls(kind, states, [(moment, float(at)) for moment, _, at in lines])

    def count(self, moment: str) -> int:
        """How often a run comes to a moment."""
        return sum(m == moment for m, _ in self.moments)

    def seconds(self, moment: str) -> float:
        """How long it is, at the median, from a moment to the next one that is not a part of it."""
        spans = []
        for n, (name, begun) in enumerate(self.moments):
            after = [at for m, at in self.moments[n + 1 :] if m in ("train", "save", "load")]
            if name == moment and after:
                spans.append(after[0] - begun)
        return sorted(spans)[len(spans) // 2]


def read(path: Path) -> dict[str, Any]:
    """A checkpoint as one process reads it, with all checks.

    Raises:
        CheckpointError: It is not whole.
    """
    with tempfile.TemporaryDirectory() as folder:
        if path.is_dir():
            consolidate(path, file := Path(folder, "whole.ckpt"))
            path = file
        check_file(str(path))
        content: dict[str, Any] = torch.load(path, weights_only=True)
    check_content(content)
    return content


def survey(folder: Path, expected: Reference, ended: bool = False) -> list[str]:
    """What is wrong with what a run has left: nothing, if each checkpoint is whole and has its step's numbers.

    Args:
        folder: Where it has saved.
        expected: The undisturbed run.
        ended: It has come to its end.
    """
    wrong = []
    for path in sorted(folder.glob("*.ckpt")):
        try:
            content = read(path)
        except CheckpointError as error:
            print(f"    {path.name} refused: {error}")
            wrong += [f"{path.name} has its name and is not whole: {error}"]
            continue
        except Exception as error:
            wrong.append(f"{path.name} cannot be read, with no clear error: {type(error).__name__}: {error}")
            continue
        wrong += _differences(path.name, content, expected.states[content["global_step"]])
    if ended:
        end = torch.load(folder / "end.pt", weights_only=True)
        wrong += _differences("the end", end, expected.states[STEPS])
        left = [p.name for p in folder.iterdir() if p.name.startswith(".")]
        wrong += [f"left behind: {left}"] if left else []
    return wrong


def _differences(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    try:
        for key in ("state_dict", "optimizer_states"):
            assert_same(_plain(ours[key]), _plain(theirs[key]), key, tolerance=0.0)
    except AssertionError as error:
        return [f"{name} differs from the undisturbed run: {error}"]
    return []


def _plain(value: Any) -> Any:
    """Without the differences between OrderedDict and dict, and those of order."""
    if isinstance(value, dict):
        return {key: _plain(value[key]) for key in sorted(value, key=str)}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


class Kill(NamedTuple):
    """When and whom."""

    phase: str
    rank: int
    count: int
    delay: float


class Killing:
    """A World of which one rank is killed from outside, some time after it has told a moment.

    Args:
        folder: Where the run saves.
        outputs: Where its output goes.
        kind: The format.
        kill: When and whom.
    """

    def __init__(self, folder: Path, outputs: Path, kind: str, kill: Kill) -> None:
        self.kill, self.killed = kill, False
        outputs.mkdir(parents=True)
        pipe = outputs / "marks"
        os.mkfifo(pipe)
        self._marks = os.open(pipe, os.O_RDWR)  # open for writing too: nobody's end ends it
        harm = Harm("train", "none", kill.rank)
        self.world = World(outputs, N, functools.partial(run, folder, harm, N, kind, marks=str(pipe)), own_session=True)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def ends(self) -> list[Any]:
        """Waits for all ranks."""
        ends = self.world.ends(patience=LIMIT)
        os.write(self._marks, b"over 0 0\n")
        self._thread.join()
        os.close(self._marks)
        return ends

    def _listen(self) -> None:
        wanted, text = f"{self.kill.phase} {self.kill.count} ", ""
        while True:
            text += os.read(self._marks, 4096).decode()
            *lines, text = text.split("\n")
            if any(line.startswith(wanted) for line in lines):
                time.sleep(self.kill.delay)
                process = self.world.processes[self.kill.rank]
                self.killed = process.exitcode is None
                process.kill()
                return
            if any(line.startswith("over") for line in lines):
                return


def draw(rng: random.Random, expected: Reference, step: int, phases: Sequence[str]) -> Kill:
    """A kill in one of some phases, with equal chances, of a run that goes on from a step."""
    left = STEPS - step
    phase = rng.choice([p for p in phases if step or p != "load"] or ["train"])
    # with each step that is saved, the last checkpoint is written anew too
    saves = min(3, 2 * left // EVERY)
    # rank 0 alone writes a file
    rank = 0 if phase == "write" and expected.kind == "full" else rng.randrange(N)
    writes = saves * (SHARED if rank else expected.count("write") // expected.count("save"))
    count = rng.randrange({"save": saves, "write": writes, "load": 1, "train": min(4, left)}[phase])
    seconds = {"load": 0.1, "write": 0.005}.get(phase) or expected.seconds(phase)
    return Kill(phase, rank, count, rng.uniform(0.0, 1.1 * seconds))


def check_ends(killing: Killing, ends: Sequence[Any]) -> list[str]:
    """What is wrong with how the ranks have ended."""
    wrong = []
    for rank, end in enumerate(ends):
        if end.code is None:
            wrong.append(f"rank {rank} hangs: {end.output[-600:]}")
        elif rank == killing.kill.rank:
            if end.code != -signal.SIGKILL:
                wrong.append(f"rank {rank} ended with {end.code}: {end.last_line}")
        elif end.code != 0 and f"rank {killing.kill.rank} died" not in end.output:
            wrong.append(f"rank {rank} does not name rank {killing.kill.rank}: {end.last_line}")
    left = in_sessions([process.pid for process in killing.world.processes])
    if left:
        wrong.append(f"processes are left: {left}")
    return wrong


def story(
    folder: Path, expected: Reference, kills: int, rng: random.Random, phases: Sequence[str]
) -> tuple[int, list[str], Counter[str]]:
    """Kills, goes on, kills, and comes to the end.

    Returns:
        How many were killed, what was wrong, and by phase how many.
    """
    saved, done, wrong, counts = folder / "saved", 0, [], Counter[str]()
    saved.mkdir(parents=True)
    for attempt in range(3 * kills):
        step = max((int(path.stem.removeprefix("step=")) for path in saved.glob("step=*.ckpt")), default=0)
        if done == kills or step == STEPS:
            break
        kill = draw(rng, expected, step, phases)
        killing = Killing(saved, folder / f"run-{attempt}", expected.kind, kill)
        ends = killing.ends()
        found = (check_ends(killing, ends) if killing.killed else []) + survey(saved, expected)
        killing.world.clear()
        partial = sum(path.name.startswith(".") for path in saved.iterdir())
        whole = sum(path.suffix == ".ckpt" for path in saved.iterdir())
        if killing.killed:
            done += 1
            counts[kill.phase] += 1
        print(
            f"  {expected.kind:8} {kill.phase:6} {kill.count}  +{kill.delay * 1000:6.1f} ms  rank {kill.rank}"
            f"  {'killed' if killing.killed else 'too late':8}  whole {whole}  partial {partial}"
            f"  {'; '.join(found) or 'ok'}",
            flush=True,
        )
        wrong += found
    outputs = folder / "last"
    outputs.mkdir()
    world = World(outputs, N, functools.partial(run, saved, NOBODY, N, expected.kind))
    wrong += [f"going on failed: {end.output[-900:]}" for end in world.ends(patience=LIMIT) if end.code != 0]
    world.clear()
    wrong += survey(saved, expected, ended=True)
    print(f"  {expected.kind:8} came to the end: {'; '.join(wrong) or 'as the undisturbed run'}", flush=True)
    return done, wrong, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--in-a-story", type=int, default=8, help="kills before a run comes to its end, at most")
    parser.add_argument("--minutes", type=float, default=600.0, help="no story begins later")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    total, wrong, counts, stories = 0, [], Counter[str](), 0
    until = time.monotonic() + 60.0 * arguments.minutes
    print(f"torch {torch.__version__}, {N} ranks, seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        references = {kind: Reference.make(kind, Path(folder, kind)) for kind in arguments.formats}
        while total < arguments.kills and time.monotonic() < until:
            kind = arguments.formats[stories % len(arguments.formats)]
            few = min(arguments.in_a_story, arguments.kills - total)
            done, found, by_phase = story(Path(folder, str(stories)), references[kind], few, rng, arguments.phases)
            total, stories = total + done, stories + 1
            wrong += found
            counts += Counter({f"{kind} {phase}": n for phase, n in by_phase.items()})
    listed = ", ".join(f"{name}: {n}" for name, n in sorted(counts.items()))
    print(f"{total} kills in {stories} stories ({listed}): {len(wrong)} violations")
    for violation in wrong:
        print(f"VIOLATION {violation}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
