"""Lightning's record of a fit's progress, as its own Trainer writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_embrace.checkpoint.progress import loader_states, put_loader_states, rewind
from tests.support.lifecycle import At
from tests.support.training import QUIET


def counted(path: Path | None, callbacks: tuple[Any, ...] = ()) -> tuple[int, ...]:
    """Trains with plain Lightning: the batches, those that this run trained on, steps, and steps that loggers see."""
    arguments = {**QUIET, "accumulate_grad_batches": 4, "limit_train_batches": 16}
    heard = At("on_train_batch_start", lambda *_: None)
    trainer = Trainer(accelerator="cpu", callbacks=[*callbacks, heard], **arguments)
    trainer.fit(BoringModel(), ckpt_path=path, weights_only=None if path is None else True)
    loop = trainer.fit_loop.epoch_loop
    return loop.total_batch_idx, len(heard.results), trainer.global_step, loop._batches_that_stepped


@pytest.mark.parametrize("batches", [1, 3, 6])
def test_rewind(tmp_path: Path, batches: int) -> None:
    """Whoever goes on trains on the batches of the window again, and counts as if nobody had saved."""
    at = At("on_train_batch_end", lambda trainer, _: trainer.save_checkpoint(tmp_path / "amid.ckpt"), count=batches)
    whole = counted(None, (at,))
    checkpoint = torch.load(tmp_path / "amid.ckpt", weights_only=True)
    rewind(checkpoint, batches % 4)
    torch.save(checkpoint, tmp_path / "before.ckpt")
    last, trained, steps, seen = counted(tmp_path / "before.ckpt")
    assert trained == 16 - batches // 4 * 4
    assert (last, steps, seen) == (whole[0], whole[2], whole[3])


def test_loader_states() -> None:
    checkpoint: dict[str, Any] = {"loops": {"fit_loop": {"state_dict": {"combined_loader": [1, 2]}}}}
    assert loader_states(checkpoint) == [1, 2]
    put_loader_states(checkpoint, [3, 4])
    assert loader_states(checkpoint) == [3, 4]
    put_loader_states(checkpoint, None)
    assert loader_states(checkpoint) is None
    assert loader_states({"loops": {"fit_loop": {}}}) is None
