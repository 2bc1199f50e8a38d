"""A run that is killed: ``python -m tests.hydra.killed FOLDER``. Trains until then, and saves after every step."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from tests.hydra.runs import hydra
from tests.hydra.test_saving import CASES, fit

STEPS = 6


class Wait(Callback):
    """Says how far it has come, and waits to be killed amid a step."""

    def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEPS:
            print("ready", flush=True)
            time.sleep(600)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    strategy = hydra(device_memory="120KiB", host_memory="4KiB", disk=folder / "disk")
    fit(CASES["adamw"], strategy, into=folder / "saved", extra=[Wait()])
