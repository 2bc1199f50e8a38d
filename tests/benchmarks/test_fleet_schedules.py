"""The table of simulated fleets."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.benchmarks.fleet_schedules import Setting, main, measure


def test_known_figures() -> None:
    """Nine and twelve equal models on eight devices: whole models leave devices idle, shards do not."""
    nine, twelve = (measure(Setting(models, 8, mixed=False), draws=1) for models in (9, 12))
    assert nine["task"] == pytest.approx(16 / 9) and twelve["task"] == pytest.approx(4 / 3)
    assert nine["lrtf"] <= 1.01 and twelve["lrtf"] <= 1.01


def test_table_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row."""
    main(["--draws", "1", "--settings", "1", "--out", str(tmp_path / "plots" / "schedules")])
    assert "| 9 equal | 8 | 1.00" in capsys.readouterr().out
    assert (tmp_path / "plots" / "schedules.png").exists()
