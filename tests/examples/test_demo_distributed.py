"""What ``make demo`` shows, on a text and tables that are small enough for a test."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

from examples.data.text import TextDataModule
from examples.models.lm import LanguageModel
from tests.support.ranks import free_port

ROOT = Path(__file__).parents[2]


def test_demo(tmp_path: Path) -> None:
    """The loss falls, and the counted bytes of ``ddp`` are all its gradients once over for two ranks."""
    words = [f"w{min(int(random.Random(i).expovariate(0.002)), 5000)}" for i in range(14_000)]
    text = tmp_path / "text.txt"
    text.write_text(" ".join(words))
    command = [sys.executable, "examples/train_lm.py", "--demo", "--text", str(text)]
    command += ["--max-epochs=2", "--dim=128", "--hidden=32", "--negatives=64"]
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MASTER_ADDR")}
    environment["MASTER_PORT"] = str(free_port())
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200
    )
    output = done.stdout.decode()
    assert done.returncode == 0, output
    losses = [float(v) for v in re.findall(r"^epoch .*train_sampled_loss +([\d.]+)", output, re.MULTILINE)]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert "EmbRace on 2 ranks" in output and "GPU available" not in output
    (line,) = re.findall(r"^bytes sent per step .*$", output, re.MULTILINE)
    here, there, ratio = (float(v.replace(",", "")) for v in re.findall(r"[\d,]+\.?\d*(?=,|$)", line)[-3:])
    model = LanguageModel(TextDataModule(str(text)).vocab_size, dim=128, hidden=32)
    assert there == sum(4 * p.numel() for p in model.parameters())
    assert ratio == round(there / here, 1) > 1.5
