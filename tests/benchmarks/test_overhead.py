"""The overhead's table, and the profile that explains it."""

from __future__ import annotations

from pathlib import Path

from examples.benchmarks.overhead import ratios
from examples.benchmarks.peers.profiled import StepProfiler


def test_ratios_are_taken_within_a_repetition() -> None:
    """A machine that was slower for a while slows both peers: 2/2, 5/4 and 3/2 have the median 1.25."""
    text = ratios({"ddp": [0.002, 0.004, 0.002], "embrace": [0.002, 0.005, 0.003]})
    assert "| ddp | 2.00 (2.00–4.00) | 1.000× |" in text
    assert "| embrace | 3.00 (2.00–5.00) | 1.250× |" in text


def test_a_profile_holds_what_ran_after_the_warm_up(tmp_path: Path) -> None:
    """Setting up and learning would hide the steps."""

    def early() -> None:
        pass

    def measured() -> None:
        pass

    profiler = StepProfiler(str(tmp_path / "profile"), warmup=1)
    early()
    profiler.step()
    measured()
    profiler.step()
    profiler.end()
    text = (tmp_path / "profile").read_text()
    assert "(measured)" in text and "(early)" not in text
