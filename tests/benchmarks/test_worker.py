"""What a rank of a job sees to before it trains."""

import pytest
from lightning.pytorch.utilities import rank_zero_only

from examples.benchmarks import worker


def test_lightning_knows_the_rank_of_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was imported when there was no rank yet, and every rank would have taken itself for the first one."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    monkeypatch.setenv("RANK", "3")
    worker._tell_lightning_the_rank()
    assert rank_zero_only.rank == 3
