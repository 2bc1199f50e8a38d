"""Successive halving: who goes on at a rung. Pure functions over what tasks have logged there."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Unit = Literal["epochs", "steps"]
_EVERY = re.compile(r"([1-9][0-9]*) (epoch|step)s?")


@dataclass(frozen=True)
class SuccessiveHalving:
    """Lets the best tasks of a fleet go on, and ends the others early.

    At each rung, every so many epochs or steps, tasks save, end their processes and wait until all that may still reach
    it have done so. Then the best of them go on.

    Args:
        monitor: The metric that decides, as a task has logged it last.
        every: Between two rungs: epochs, or ``"200 steps"`` of the optimizer.
        keep: The share that goes on, rounded down; one task at least.
        mode: ``"min"`` or ``"max"``: which metric is better.

    Raises:
        ValueError: An argument has a value that is not allowed.
    """

    monitor: str
    every: int | str
    keep: float = 0.5
    mode: str = "min"

    def __post_init__(self) -> None:
        _parsed(self.every)
        if not 0.0 < self.keep < 1.0:
            raise ValueError(f"SuccessiveHalving(keep={self.keep!r}): give a share between 0 and 1.")
        if self.mode not in ("min", "max"):
            raise ValueError(f"SuccessiveHalving(mode={self.mode!r}): allowed are 'min', 'max'.")

    @property
    def unit(self) -> Unit:
        """What rungs are counted in."""
        return _parsed(self.every)[1]

    def rung(self, number: int) -> int:
        """Where a rung is, in epochs or steps since the beginning.

        Args:
            number: From 1 on.
        """
        return number * _parsed(self.every)[0]

    def places(self, tasks: int) -> int:
        """How many go on.

        Args:
            tasks: Of so many.
        """
        return max(1, math.floor(round(tasks * self.keep, 9)))


def _parsed(every: int | str) -> tuple[int, Unit]:
    found = _EVERY.fullmatch(f"{every} epochs" if isinstance(every, int) else every)
    if found is None or isinstance(every, bool):
        raise ValueError(
            f"SuccessiveHalving(every={every!r}): give epochs, a whole number from 1 on, or steps, as in '200 steps'."
        )
    return int(found[1]), "epochs" if found[2] == "epoch" else "steps"


@dataclass(frozen=True)
class Runner:
    """A task.

    Attributes:
        scores: Its metric at each rung that it has reached.
        state: ``"runs"``: it may still reach its next rung; ``"paused"``: it waits at its last one; ``"failed"``;
            ``"ended"``: otherwise.
    """

    scores: Sequence[float]
    state: Literal["runs", "paused", "failed", "ended"]


@dataclass(frozen=True)
class Verdict:
    """What becomes of a task that was paused.

    Attributes:
        goes_on: Or ends.
        why: Says so.
    """

    goes_on: bool
    why: str


def verdicts(halving: SuccessiveHalving, runners: Mapping[str, Runner]) -> dict[str, Verdict]:
    """Decides at the lowest rung at which tasks wait, if no more will come.

    Ties are for the first of the tasks. A metric that is no number is worse than any. A task that has failed on its way
    counts as the worst; one that has finished before does not count. Who comes late, since it had failed, goes on if
    it is better than enough of all those that have ever been there: what was decided stays.

    Args:
        halving: Says how many are to go on.
        runners: All tasks by name, in their order.

    Returns:
        For each task that waits at that rung. Empty: nothing is decided yet. There may be more to decide then.
    """
    number = min((len(r.scores) for r in runners.values() if r.state == "paused"), default=0)
    if number == 0 or any(r.state == "runs" and len(r.scores) < number for r in runners.values()):
        return {}
    scores = {name: r.scores[number - 1] for name, r in runners.items() if len(r.scores) >= number}
    missed = sum(r.state == "failed" and len(r.scores) < number for r in runners.values())
    best = sorted(scores, key=lambda name: _badness(scores[name], halving.mode))  # stable: ties by order
    places = halving.places(len(best) + missed)
    where = f"{halving.unit[:-1]} {halving.rung(number)}"
    found: dict[str, Verdict] = {}
    for rank, name in enumerate(best):
        runner = runners[name]
        if runner.state == "paused" and len(runner.scores) == number:
            why = f"number {rank + 1} of {len(best) + missed} at {where}, {halving.monitor} {scores[name]:.4g}"
            found[name] = Verdict(rank < places, f"successive halving: {why}, and {places} went on")
    return found


def _badness(score: float, mode: str) -> tuple[bool, float]:
    return math.isnan(score), 0.0 if math.isnan(score) else score if mode == "min" else -score
