"""The example of a fleet, in a size for a test."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from examples import train_fleet

SIZES = ["--dim=32", "--layers=6", "--heads=2", "--sequence-length=8", "--batch-size=4", "--max-vocab=40"]


@pytest.mark.matrix
def test_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two learning rates, in less memory than a model takes; the numbers are a plain Trainer's; a table says them."""
    monkeypatch.chdir(tmp_path)
    numbers = random.Random(0)
    Path("text.txt").write_text(" ".join(f"w{numbers.randrange(30)}" for _ in range(600)))
    given = ["--text=text.txt", *SIZES, "--memory=900KiB", "--devices=1", "--threads=1", "--lr", "0.01", "0.001"]
    monkeypatch.setattr(sys, "argv", ["train_fleet.py", *given])
    train_fleet.main()
    printed = capsys.readouterr().out
    assert "│ lr=0.01  │ finished │ train_loss " in printed and "│ lr=0.001 │ finished │ train_loss " in printed
    assert "for shards" in Path("fleet", "lr=0.01", "log.txt").read_text(), "the model has fitted its share"
    task = train_fleet.make_task(train_fleet.parse_arguments(given), lr=0.01)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seed_everything(0, verbose=False)
        model = task.factory()
        Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **task.trainer_kwargs).fit(
            model, datamodule=task.loaders()
        )
    finally:
        torch.set_num_threads(threads)
    trained = torch.load(Path("fleet", "lr=0.01", "last.ckpt"), weights_only=True)["state_dict"]
    assert trained.keys() == model.state_dict().keys()
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())
