"""The example of a GPT that does not fit its budget, in a size for a test."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import pytest
import torch

from examples import train_gpt_spilled
from examples.models import GPT

SIZES = ["--dim=32", "--layers=5", "--heads=2", "--sequence-length=8", "--batch-size=4", "--min-count=1", "--lr=0.01"]
SPILLED = ["--device-memory=700KiB", "--host-memory=300KiB", "--disk=."]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Words in turn, and now and then another one; whatever is written is written beside them."""
    monkeypatch.chdir(tmp_path)
    numbers = random.Random(0)
    words = [n % 7 if numbers.random() < 0.9 else numbers.randrange(30) for n in range(600)]
    Path("text.txt").write_text(" ".join(f"w{n}" for n in words))
    return "--text=text.txt"


def test_the_numbers_of_plain_training(text: str) -> None:
    """Bit by bit, dropout included, with one matrix for embedding and head; what moves is in the progress bar."""
    states = []
    for way in (["--plain"], SPILLED):
        args = train_gpt_spilled.parse_arguments([text, *SIZES, *way])
        model, data = train_gpt_spilled.build(args)
        trainer = train_gpt_spilled.make_trainer(args)
        trainer.fit(model, datamodule=data)
        states.append(model.state_dict())
        assert trainer.callback_metrics["val_loss"] < math.log(data.vocab_size) - 0.1
    plain, ours = states
    assert plain.keys() == ours.keys()
    for name, value in plain.items():
        assert torch.equal(ours[name], value), name
    shown = trainer.progress_bar_metrics
    for tier in ("host", "disk"):
        assert shown[f"hydra/{tier}_read_mb"] > 0 and shown[f"hydra/{tier}_written_mb"] > 0


def test_the_script(text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the plan, and does nothing but what the command line says."""
    monkeypatch.setattr(sys, "argv", ["train_gpt_spilled.py", text, *SIZES, *SPILLED, "--max-steps=2"])
    train_gpt_spilled.main()
    printed = capsys.readouterr()
    assert "blocks.0" in printed.out + printed.err and "a step reads" in printed.out + printed.err


def test_heads_divide_the_width() -> None:
    with pytest.raises(ValueError, match="heads=3 and dim=32"):
        GPT(10, 8, dim=32, heads=3)
