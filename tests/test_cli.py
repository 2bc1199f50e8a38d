"""The strategy in a LightningCLI: every argument settable, and one clear error for what is not accepted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch.cli
import pytest
import pytorch_lightning.cli
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment

import lightning_embrace.cli
import lightning_embrace.pytorch_lightning
from tests.support import program

HERE = "lightning_embrace.EmbRaceStrategy"
THERE = "lightning_embrace.pytorch_lightning.EmbRaceStrategy"


@pytest.fixture(autouse=True)
def bare_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns when it is given arguments beside those of the process, here pytest's."""
    monkeypatch.setattr("sys.argv", ["script.py"])


def strategy_of(folder: Path, init_args: dict[str, Any], *flags: str, class_path: str = HERE, old: bool = False) -> Any:
    """Parses a config as the CLI of a user's script does, and returns the trainer's strategy."""
    strategy = {"class_path": class_path, "init_args": init_args}
    config = {"trainer": {"accelerator": "cpu", "devices": 1, "logger": False, "strategy": strategy}}
    (folder / "config.yaml").write_text(json.dumps(config))
    pl, model = (pytorch_lightning, program.OldNet) if old else (lightning.pytorch, program.Net)
    args = ["--config", str(folder / "config.yaml"), *flags]
    return pl.cli.LightningCLI(model, run=False, save_config_callback=None, args=args).trainer.strategy


def foresee(batch: Any) -> Mapping[str, torch.Tensor]:
    """A look-ahead by import path."""
    return {"encoder.words": batch["words"]}


def test_every_argument(tmp_path: Path) -> None:
    strategy = strategy_of(
        tmp_path,
        {
            "tables": ["encoder.*", "!encoder.tags"],
            "schedule": "fifo",
            "lookahead": f"{__name__}.foresee",
            "uneven_loaders": "raise",
            "chunk_bytes": 1000,
            "trace": "trace.json",
            "wire_dtype": "bf16",
            "process_group_backend": "gloo",
            "timeout": "0:10:00",
            "start_method": "spawn",
            "state_dict_type": "sharded",
            "cluster_environment": {"class_path": "lightning.pytorch.plugins.environments.LightningEnvironment"},
        },
        "--trainer.strategy.wire_dtype=fp16",
    )
    config = strategy.config
    assert type(strategy) is lightning_embrace.EmbRaceStrategy
    assert isinstance(strategy.cluster_environment, LightningEnvironment)
    assert config.tables == ("encoder.*", "!encoder.tags")
    assert (config.schedule, config.wire_dtype, config.start_method) == ("fifo", torch.float16, "spawn")
    assert (config.lookahead, config.uneven_loaders) == (foresee, "raise")
    assert (config.chunk_bytes, config.trace) == (1000, "trace.json")
    assert config.state_dict_type == "sharded"
    assert (config.process_group_backend, config.timeout) == ("gloo", timedelta(minutes=10))


def test_names(tmp_path: Path) -> None:
    assert strategy_of(tmp_path, {}, "--trainer.strategy=embrace_fork").config.start_method == "fork"


@pytest.mark.parametrize(
    ("init_args", "said"),
    [
        ({"tables": "words"}, "'auto'], list[str]"),
        ({"wire_dtype": "fp8"}, "Literal['bf16', 'fp16']"),
        ({"start_method": "thread"}, "Literal['popen', 'spawn', 'fork', 'forkserver']"),
        ({"timeout": 600}, 'a string with form "h:m:s"'),
        ({"schedule": "3d"}, "Literal['2d', 'horizontal', 'vertical', 'fifo']"),
        ({"lookahead": 3}, "Literal['auto', 'off']"),
        ({"uneven_loaders": "wait"}, "Literal['stop', 'raise']"),
        ({"communication": "mpi"}, "Literal['torch', 'horovod']"),
        ({"state_dict_type": "local"}, "Literal['full', 'sharded']"),
    ],
    ids=str,
)
def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], init_args: dict[str, Any], said: str) -> None:
    """The parser says what is wrong, and what is allowed."""
    with pytest.raises(SystemExit) as raised:
        strategy_of(tmp_path, init_args)
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("init_args", "said"),
    [
        ({"chunk_bytes": 0}, r"EmbRaceStrategy\(chunk_bytes=0\): give a positive number of bytes"),
        ({"tables": [""]}, r"EmbRaceStrategy\(tables=\[''\]\): every pattern must be a non-empty string"),
        ({"timeout": "-1 day, 0:00:00"}, r"EmbRaceStrategy\(timeout=.*\): give a positive datetime.timedelta"),
        ({"process_group_backend": "mpi2"}, r"process_group_backend='mpi2'\): torch.distributed knows 'gloo', 'nccl'"),
    ],
    ids=str,
)
def test_refused_by_the_strategy(tmp_path: Path, init_args: dict[str, Any], said: str) -> None:
    """What types cannot say, the strategy's own error does."""
    with pytest.raises(ValueError, match=said):
        strategy_of(tmp_path, init_args)


def test_the_other_namespace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The CLI of pytorch_lightning takes that namespace's class and names the one it cannot take."""
    strategy = strategy_of(tmp_path, {"tables": ["words"]}, class_path=THERE, old=True)
    assert type(strategy) is lightning_embrace.pytorch_lightning.EmbRaceStrategy
    with pytest.raises(SystemExit):
        strategy_of(tmp_path, {}, old=True)
    error = capsys.readouterr().err
    assert HERE in error and "pytorch_lightning.strategies.strategy.Strategy" in error


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m lightning_embrace`` offers LightningCLI's four commands and ``plan``, and says what one lacks."""
    monkeypatch.setattr("sys.argv", ["lightning_embrace", "--help"])
    with pytest.raises(SystemExit):
        lightning_embrace.cli.main()
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m lightning_embrace ")
    assert "{fit,validate,test,predict,plan}" in shown
    monkeypatch.setattr("sys.argv", ["lightning_embrace", "fit"])
    with pytest.raises(SystemExit):
        lightning_embrace.cli.main()
    assert "the following arguments are required: fit.model" in capsys.readouterr().err


def test_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``plan`` shows a config's model on the ranks of its trainer, and nothing is allocated or started."""
    command = "lightning_embrace plan --model tests.test_dryrun.Large --model.rows 80000000"
    trainer = " --trainer.accelerator cpu --trainer.devices 8 --trainer.strategy embrace"
    monkeypatch.setattr("sys.argv", (command + trainer).split())
    lightning_embrace.cli.main()
    shown = capsys.readouterr().out
    assert "EmbRace on 8 ranks" in shown and "80,000,000 × 128" in shown
    assert "5.12 GB" in shown and "sharded" in shown
