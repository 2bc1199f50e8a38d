"""``python -m lightning_embrace`` and a user's own LightningCLI on two processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from lightning_embrace.cli import main
from tests.support.program import Net, Rows
from tests.support.ranks import free_port, run_by_hand
from tests.test_launch_distributed import ROOT, run


class Served(Net):
    """The program's model with all four commands, each of which leaves a file."""

    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.words(batch["ids"]).sum(dim=(1, 2))

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_size=2)

    test_dataloader = predict_dataloader = val_dataloader

    def teardown(self, stage: str) -> None:
        """Weights are still sharded here, metrics and predictions are complete."""
        seen: dict[str, Any] = {k: float(v) for k, v in self.trainer.callback_metrics.items()}
        if self.trainer.predicting:
            batches = self.trainer.predict_loop.predictions
            seen["predictions"] = [float(v) for batch in batches for v in batch]
        command = self.trainer.state.fn.value
        path = Path(os.environ["PROGRAM_OUT"], f"{command}{self.trainer.global_rank}.json")
        path.write_text(json.dumps(seen))


def call(entry: str, out: Path, commands: list[list[str]]) -> None:
    """Runs in a process: command lines, each with a folder of its own."""
    os.environ["PROGRAM_OUT"] = str(out)
    for number, command in enumerate(commands):
        # without a logger, configs are saved there, and Lightning never writes one over another
        sys.argv = ["program", *command, f"--trainer.default_root_dir={out / str(number)}"]
        if entry == "lightning_embrace":
            main()
        else:  # what anyone's script says
            LightningCLI(Served)


def places() -> list[dict[str, str]]:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**common, "NODE_RANK": "0", "LOCAL_RANK": str(rank)} for rank in range(2)]


def seen(out: Path, stage: str) -> list[dict[str, Any]]:
    return [json.loads((out / f"{stage}{rank}.json").read_text()) for rank in range(2)]


QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.mark.parametrize("entry", ["lightning_embrace", "a user's"])
def test_four_commands(tmp_path: Path, entry: str) -> None:
    """Fit writes a checkpoint; validate, test and predict read it and agree with it on two ranks."""
    init_args = {"tables": ["words", "!bags"], "timeout": "0:02:00", "process_group_backend": "gloo"}
    strategy = {"class_path": "lightning_embrace.EmbRaceStrategy", "init_args": init_args}
    config: dict[str, Any] = {"trainer": {"accelerator": "cpu", "devices": 2, "strategy": strategy, "max_epochs": 1}}
    config["trainer"] |= QUIET
    if entry == "lightning_embrace":
        config["model"] = {"class_path": "tests.test_cli_distributed.Served"}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config))
    checkpoint = tmp_path / "0" / "checkpoints" / "epoch=0-step=6.ckpt"
    commands = [["fit", "--config", str(path)]]
    commands += [[c, "--config", str(path), f"--ckpt_path={checkpoint}"] for c in ("validate", "test", "predict")]
    run_by_hand(places(), call, entry, tmp_path, commands)
    fit, test = seen(tmp_path, "fit"), seen(tmp_path, "test")
    assert fit[0]["val_loss"] == fit[1]["val_loss"]
    for validated, tested in zip(seen(tmp_path, "validate"), test):
        assert validated["val_loss"] == tested["test_loss"] == pytest.approx(fit[0]["val_loss"], rel=0, abs=1e-12)
    table = torch.load(checkpoint, weights_only=True)["state_dict"]["words.weight"]
    for rank, predicted in enumerate(seen(tmp_path, "predict")):
        expected = [table[Rows()[index]["ids"]].sum() for index in range(rank, len(Rows()), 2)]
        assert predicted["predictions"] == pytest.approx([float(v) for v in expected])


def test_example_configs(tmp_path: Path) -> None:
    """The two shipped configs train; the one of ``embrace`` through the real command, which starts the second rank."""
    short = ["--trainer.max_steps=3", "--trainer.limit_val_batches=1"]
    short += [f"--trainer.{key}=false" for key in QUIET]
    command = [sys.executable, "-m", "lightning_embrace", "fit", "--config", "examples/configs/lm_embrace.yaml"]
    output = run([*command, *short, f"--trainer.default_root_dir={tmp_path}"], MASTER_PORT=str(free_port()))
    assert "`Trainer.fit` stopped: `max_steps=3` reached." in output
    assert "EmbRace on 2 ranks" in output and "sharded" in output
    command = ["fit", "--config", str(ROOT / "examples/configs/lm_ddp.yaml")]
    run_by_hand(places(), call, "lightning_embrace", tmp_path, [[*command, *short]])
    name = "checkpoints/epoch=0-step=3.ckpt"
    weights, plain = (torch.load(f / name, weights_only=True)["state_dict"] for f in (tmp_path, tmp_path / "0"))
    assert weights.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
