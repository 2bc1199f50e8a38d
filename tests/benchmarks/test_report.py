"""The benchmark's tables say what was measured."""

from __future__ import annotations

import dataclasses
import json

import pytest

from examples.benchmarks.bounds import bound, critical, step_work
from examples.benchmarks.job import Job
from examples.benchmarks.report import heading, losses_agree, main, markdown, volumes
from examples.benchmarks.rows import Row, Setting, quartiles, summarise


def record(peer, seconds, losses=(2.0, 1.0), ranks=2, error=None, counted=None, counts=None, rate="", **more):
    """One job with constant steps, as run.py writes it."""
    step = {"seconds": 0.0, "cpu": 0.25, "sent": 100, "received": 100, "loss": 1.0, "counts": counts or {}}
    about = {"tables": 2, "relaxed": True, "barrier because": None, "blind because": None, "exposed": [0.25, 0.75]}
    results = [
        {"error": error}
        if error
        else {
            "steps": [{**step, "seconds": s, "sent": 100 * (r + 1)} for s in seconds],
            "losses": [loss + r for loss in losses],
            "peak_rss": 1_000_000 * (r + 1),
            **({"counted": counted} if counted else {}),
            **({"about": about | more.pop("about", {}), "blocks": [30, 10]} if counts else {}),
        }
        for r in range(ranks)
    ]
    job = Job(peer, "lm", **{"ranks": ranks, **more})
    return {"job": json.loads(job.to_json()), "results": results, "rate": rate, "cores": 2}


def test_a_row_holds_medians_over_repetitions_and_the_worst_rank():
    """Two repetitions become one row; bytes and memory are those of the rank that has most."""
    (row,) = summarise([record("embrace", [1.0, 2.0]), record("embrace", [3.0, 4.0, 5.0])])
    assert row.seconds == (2.0, 3.0, 4.0)
    assert row.sent == 200
    assert row.memory == 2_000_000
    assert row.cpu == 0.5
    assert row.idle == 1 - 0.5 / (2 * 3.0)  # what two cores could have done in a step
    assert row.losses == (2.5, 1.5)


def test_a_peer_that_cannot_run_is_listed_with_its_error():
    """Never dropped: the table says why."""
    rows = summarise([record("embrace", [1.0]), record("ddp", [1.0], error="ValueError: no | such\nthing")])
    text = markdown(rows)
    assert "| ddp, dense gradients | did not run: ValueError: no \\| such thing |" in text


def test_ratios_are_to_embrace():
    """3 s against 1.5 s is 2.00×, and the bound is the larger of compute and bytes over bandwidth."""
    rows = summarise([record(peer, [s], rate="1600bit") for peer, s in (("embrace", 1.5), ("ddp", 3.0), ("none", 0.5))])
    line = next(row for row in markdown(rows).splitlines() if row.startswith("| ddp,"))
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[3] == "2.00×"
    assert cells[6] == "1.000"  # 200 bytes at 200 bytes a second, not the 0.5 s of compute
    assert cells[7] == "3.00"
    assert cells[16] == "yes"


@pytest.mark.parametrize(("losses", "same"), [((2.0, 1.0), True), ((2.0, 1.1), False)])
def test_different_losses_are_no_comparison(losses, same):
    """A peer whose curve differs did other work, and the table says so."""
    ours, theirs = summarise([record("embrace", [1.0]), record("ddp", [1.0], losses=losses)])
    assert losses_agree(theirs, ours, 1e-6) is same
    assert ("**no**" in markdown([ours, theirs])) is not same


def test_a_row_without_losses_agrees_with_nothing():
    """No measurement is not the same work."""
    job = Job("ddp", "lm")
    row = Row(job, Setting(job.work))
    assert not losses_agree(row, row, 1.0)


def test_level_takes_the_part_of_the_ranks_out():
    """Rows and gradients times N/(N−1) is what must not grow with N; ids stand apart."""
    counted = {"sent": {"rows": 300, "grads": 300, "ids": 40}, "received": {}, "steps": 2}
    (row,) = summarise([record("embrace", [1.0], ranks=4, counted=counted)])
    assert row.level == pytest.approx(300 * 4 / 3)
    assert "| lm | 4 | embrace | 0.0004 | 0.0000 |" in volumes([row])


def test_quartiles_of_one_value():
    """A single step is its own median."""
    assert quartiles([2.0]) == (2.0, 2.0, 2.0)


def test_bound_without_a_shaped_link_is_compute():
    """Nothing is known of the bandwidth then."""
    assert bound(0.5, 1e9, 0) == 0.5


def test_a_job_survives_the_command_line():
    """Ranks get exactly what run.py decided."""
    job = Job("ddp", "gnmt", ranks=4, exponent=1.3, wire_dtype="bf16")
    assert Job.from_json(job.to_json()) == job
    assert job.same_work_as(dataclasses.replace(job, peer="embrace", wire_dtype="", warmup=1, steps=2, trace="x"))
    assert not job.same_work_as(dataclasses.replace(job, seed=7))


COUNTS = {"sent rows": 40, "received rows": 60, "sent grads": 50, "sent dense": 80, "sent ids": 10}
ROWS = {"prior": 2, "delayed": 3, "early": 5, "rest": 1, "tables foreseen": 2}


def test_other_jobs_are_no_comparison():
    """Equal losses by chance, or since nothing was learned, are not the same work."""
    (ours,), (theirs,) = (summarise([record(peer, [1.0], seed=seed)]) for peer, seed in (("embrace", 1), ("ddp", 2)))
    assert ours.losses == theirs.losses
    assert not losses_agree(theirs, ours, 1.0)


def test_settings_that_differ_get_tables_of_their_own():
    """Runs at another rate or size are no repetitions of each other; numbers of steps do not matter."""
    rows = summarise([record("ddp", [1.0], rate=rate, steps=steps) for rate in ("1gbit", "2gbit") for steps in (2, 5)])
    assert [row.setting.rate for row in rows] == ["1gbit", "2gbit"]
    assert markdown(rows).count("####") == 2


def test_a_traced_run_is_not_timed():
    """Recording costs time; only what was waited for is taken from it."""
    runs = [record("embrace", [1.0], counts=ROWS), record("embrace", [9.0], counts=ROWS, trace="x.json")]
    (row,) = summarise(runs)
    assert row.seconds == (1.0, 1.0, 1.0)
    assert row.exposed == 0.5
    (row,) = summarise(runs[:1])
    assert row.exposed is None


def test_a_steps_work_is_what_was_counted():
    """By kind, the busier direction, with the link's overhead on top, and divided among the blocks."""
    (row,) = summarise([record("embrace", [1.0], counts=COUNTS | ROWS, rate="800bit")])
    work = step_work(row, compute=12.0)
    assert (work.forward, work.backward) == ([3.0, 1.0], [6.0, 2.0])
    # 60 bytes of rows, a sixth of them rest; 50 of gradients, two fifths of them prior; nothing exceeds the payload
    assert (work.dense, work.prior, work.rest, work.free) == ([60.0, 20.0], 20.0, 10.0, 90.0)
    busy = dataclasses.replace(row, wire=400.0)
    assert step_work(busy, 12.0).bytes == pytest.approx(400.0)
    emulated = dataclasses.replace(row, job=dataclasses.replace(row.job, compute="emulated", compute_ms=2000.0))
    assert critical(emulated, None) == pytest.approx(2.0 + (60 + 20 + 10) / 100)


def test_shares_and_the_critical_path_are_shown():
    """Prior 2 of 5, early 5 of 6 rows; a peer that counts nothing has a dash."""
    rows = summarise(
        [record("embrace", [2.2], counts=COUNTS | ROWS, rate="800bit"), record("ddp", [3.0], rate="800bit")]
    )
    ours, theirs = (
        [c.strip() for c in line.split("|")] for line in markdown(rows).splitlines() if "% |" in line or "ddp" in line
    )
    assert ours[13:15] == ["40%", "83%"]
    assert ours[8:10] == ["2.000", "1.10"]
    assert theirs[8:10] == theirs[13:15] == ["–", "–"]


def test_what_kept_a_schedule_from_being_carried_out_is_said():
    """A benchmark of a schedule that silently was another one would be worthless."""
    held = {"about": {"relaxed": False, "barrier because": "gradients are clipped"}}
    rows = summarise([record("embrace", [1.0], counts={**ROWS, "tables foreseen": 1}, **held)])
    assert "- embrace waits for all gradients, because gradients are clipped" in markdown(rows)
    assert "foreseen in 0 of 2 steps only" in markdown(rows)
    assert not summarise([record("embrace-fifo", [1.0], counts={**ROWS, "tables foreseen": 0})])[0].notes


def test_several_runs_become_one_report(tmp_path):
    """A long benchmark is split; its heading names every command once."""
    files = []
    for name, peer in (("a", "embrace"), ("b", "ddp"), ("c", "none")):
        files.append(tmp_path / f"{name}.jsonl")
        measured = {**record(peer, [1.0]), "command": name, "machine": "m"}
        files[-1].write_text(json.dumps(measured) + "\n")
    main([*map(str, files), "--out", str(tmp_path / "out")])
    report = (tmp_path / "out" / "report.md").read_text()
    assert "- command: a; b; c" in report and "- machine: m\n" in report
    assert report.count("#### lm") == 1 and "| ddp, dense gradients | 1.000" in report
    assert (tmp_path / "out" / "steps-lm-sgd.png").exists()
    assert heading([{"cores": 2}, {"cores": 2}]).splitlines()[1] == "- cores: 2"
