"""Beyond what plain training restores: random numbers, and windows of accumulated gradients."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from tests.hydra import zoo
from tests.hydra.runs import assert_same, hydra
from tests.hydra.test_saving import AMID, BATCHES, Case, fit, rest_of


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_random_numbers(kind: str, tmp_path: Path) -> None:
    """Of torch, Python and NumPy: a run that goes on draws what the uninterrupted one has drawn."""
    case = Case(partial(zoo.Random, adamw), "100KiB")
    ours = partial(hydra, device_memory=case.device, state_dict_type=kind)
    whole = fit(case, ours(), into=tmp_path)
    assert_same(whole, fit(case, "auto"))
    for steps, at in ((AMID, f"step={AMID}.ckpt"), (BATCHES, "end-epoch=0.ckpt")):
        assert_same(fit(case, ours(), from_=str(tmp_path / at)), rest_of(whole, steps))
    plain = fit(case, "auto", from_=str(tmp_path / at)) if kind == "full" else None
    assert plain is None or plain.losses != whole.losses[BATCHES:]  # which plain training does not


def test_amid_a_window(tmp_path: Path) -> None:
    """Gradients that wait for more are in no checkpoint: its batches are trained on again, by whoever goes on."""

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (trainer.current_epoch, batch_idx) == (0, 4):
                trainer.save_checkpoint(tmp_path / "amid.ckpt")

    case = Case(partial(zoo.Stack, adamw), "120KiB", lambda: {"accumulate_grad_batches": 3})
    whole = fit(case, "auto")
    assert_same(fit(case, hydra(device_memory=case.device), extra=[Save()]), whole)
    assert torch.load(tmp_path / "amid.ckpt", weights_only=True)["global_step"] == 1
    for strategy in (hydra(device_memory=case.device), "auto"):
        assert_same(fit(case, strategy, from_=str(tmp_path / "amid.ckpt")), rest_of(whole, 3))


def test_a_file_of_plain_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Has no random states, which is said once."""
    case = Case(zoo.Stack, "80KiB")
    fit(case, "auto", into=tmp_path, max_epochs=1)
    with caplog.at_level("INFO"):
        fit(case, hydra(device_memory="80KiB"), from_=str(tmp_path / f"step={AMID}.ckpt"))
    said = [r.getMessage() for r in caplog.records if "has no random states" in r.getMessage()]
    assert len(said) == 1 and "not written under `embrace` or `hydra`" in said[0]
