"""The table of throughput: ratios, shares and what is said of losses."""

from __future__ import annotations

from typing import Any

from examples.benchmarks.spilled_job import Job
from examples.benchmarks.spilled_throughput import DEEPSPEED, PLAIN, hidden, jobs_of, markdown


def run(seconds: float, losses: tuple[float, ...] = (3.0, 2.0), **transfers: float) -> dict[str, Any]:
    return {"seconds": [9.0, 9.0, seconds, seconds], "losses": list(losses), "transfers": transfers}


def test_hidden() -> None:
    """Of ten seconds of transfers somebody waited for two; nothing was moved; waiting for more than was moved."""
    assert hidden([run(1, moving=4, waiting=1), run(1, moving=6, waiting=1)]) == 0.8
    assert hidden([run(1)]) is None
    assert hidden([run(1, moving=1, waiting=2)]) == 0.0


def test_ratios_are_those_of_one_turn() -> None:
    """A machine that is slower in one turn slows all alike; the first two steps do not count."""
    rows = {
        PLAIN: [run(1.0), run(2.0), run(1.0)],
        "ours": [run(1.25), run(2.5), run(1.25, moving=4.0, waiting=1.0)],
        DEEPSPEED: [run(4.0, (3.0, 2.00001)), run(8.0), run(4.0)],
    }
    table = markdown(rows, {"other": "no compiler"}).splitlines()
    assert table[3] == "| ours | 1.250 (1.250–2.500) | 0.80× | 3.20× | 0.667 | 75% | yes, bit by bit |"
    assert table[4].endswith("| 0.25× | 1.00× | – | – | yes |")
    assert table[5].startswith("| other | did not run: no compiler |")


def test_other_losses_are_shown() -> None:
    """Those of hydra must be equal; another implementation's may be near."""
    rows = {PLAIN: [run(1.0)], "ours": [run(1.0, (3.0, 2.00001))], DEEPSPEED: [run(1.0, (3.0, 2.1))]}
    assert [line.endswith("| **no** |") for line in markdown(rows, {}).splitlines()[2:]] == [False, True, True]


def test_budgets_of_the_peers() -> None:
    jobs = list(jobs_of(Job(dim=512, layers=12, vocabulary=1000), "/disk").values())
    assert [j.strategy for j in jobs] == ["auto", *["hydra"] * 5, "deepspeed"]
    assert [j.prefetch for j in jobs] == [True, True, True, False, True, False, True]
    assert [bool(j.disk) for j in jobs] == [False, False, False, False, True, True, False]
    assert jobs[2].device < 12 * 12 * 512**2 * 4 < jobs[1].device
