"""``python -m lightning_embrace fleet``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lightning_embrace.cli
from lightning_embrace import HydraFleet, SuccessiveHalving

EXAMPLE = Path(__file__).parents[2] / "examples" / "configs" / "gpt_fleet.yaml"
NOISY = {"class_path": "tests.fleet.zoo.Noisy", "init_args": {}}
DATA = {"class_path": "tests.fleet.zoo.Data"}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Calls the program in this process; its exit status."""
    monkeypatch.setattr("sys.argv", ["lightning_embrace", "fleet", *arguments])
    with pytest.raises(SystemExit) as ended:
        lightning_embrace.cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config that is in the examples, over a few batches: models are larger than their shares of a device.

    A task that fails makes the status 1, and is tried again with ``--resume``.
    """
    at = {"class_path": "tests.fleet.zoo.At", "init_args": {"step": 0, "what": "raise", "once": str(tmp_path / "once")}}
    fleet = ["--config", str(EXAMPLE), "--folder", str(tmp_path / "fleet"), "--grid", '{"model.init_args.lr":[1]}']
    fleet += ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]
    own = {"name": "bad", "model": {"init_args": {"layers": 4}}, "trainer": {"callbacks": [at]}}
    fleet += ["--tasks", json.dumps([{"name": "deep"}, own])]
    assert run(monkeypatch, *fleet) == 1
    printed = capsys.readouterr().out
    assert "│ deep,lr=1 │ finished │ train_loss " in printed and "│ bad,lr=1  │ failed   │" in printed
    assert "\nbad,lr=1: ZeroDivisionError: a bug of the user's (after step " in printed
    assert "for shards" in (tmp_path / "fleet" / "deep,lr=1" / "log.txt").read_text(), "the model has fitted its share"
    assert run(monkeypatch, *fleet) == 2
    assert "Write fit(resume=True), or --resume, to go on" in capsys.readouterr().err
    assert run(monkeypatch, *fleet, "--resume") == 0
    assert "│ bad,lr=1  │ finished │ train_loss" in capsys.readouterr().out


def test_halving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Is an argument of the config, as all others of the fleet are."""
    made: list[HydraFleet] = []
    monkeypatch.setattr(HydraFleet, "fit", lambda fleet, resume: made.append(fleet) or [])
    config = {"model": NOISY, "halving": {"monitor": "val_loss", "every": "20 steps"}, "strategy": {"prefetch": False}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert run(monkeypatch, "--config", str(tmp_path / "config.yaml"), "--halving.keep=0.25", "--max_live=3") == 0
    (fleet,) = made
    assert fleet.halving == SuccessiveHalving("val_loss", "20 steps", 0.25) and fleet.config.max_live == 3
    assert fleet.tasks["task-0"].strategy_kwargs == {"prefetch": False} and fleet.tasks["task-0"].trainer_kwargs == {}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"data": DATA}, "task 'task-0': the following arguments are required: model"),
        ({"model": {"class_path": "nowhere.Model"}}, "No module named 'nowhere'"),
        ({"model": {**NOISY, "init_args": {"lr": "much"}}}, "Expected a <class 'float'>. Got value: much"),
        ({"model": NOISY, "trainer": {"devices": 2}}, "does not accept option 'devices'"),
        ({"model": NOISY, "strategy": {"disk": "/tmp"}}, "does not accept option 'disk'"),
        ({"model": NOISY, "policy": "fair"}, "HydraFleet(policy='fair'): allowed are 'lrtf'"),
        ({"model": NOISY, "tasks": [{"name": ".."}]}, "is no name of a folder"),
        ({"model": NOISY, "grid": {"lr": [1]}}, "grid: 'lr' is no argument of a task"),
    ],
    ids=str,
)
def test_refused(
    config: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is wrong is said before anything is started."""
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    assert run(monkeypatch, "--config", str(path), "--folder", str(tmp_path / "fleet")) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "fleet").exists()
