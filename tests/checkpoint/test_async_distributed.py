"""AsyncCheckpointIO: what is saved is the state at the call, although training goes on while it is written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_embrace.checkpoint.atomic import PARTIAL
from tests.support.lifecycle import At, assert_same, loader, make_model, make_strategy, make_trainer, results, this_rank


def save(path: str, optimizer: str, sparse: bool, at_once: bool) -> Any:
    """Saves after the second of five steps, and does not begin to write before the fourth has been made."""
    allowed, io = threading.Event(), AsyncCheckpointIO()
    trainer_arguments: dict[str, Any] = {} if at_once else {"plugins": [io]}
    written_at: list[int] = []

    def start(trainer: Any, _: Any) -> None:
        if at_once:
            return
        inner = trainer.strategy.checkpoint_io.checkpoint_io
        write = inner.save_checkpoint

        def wait_and_write(*args: Any, **kwargs: Any) -> None:
            assert allowed.wait(60)
            written_at.append(trainer.global_step)
            write(*args, **kwargs)

        inner.save_checkpoint = wait_and_write

    def step(trainer: Any, _: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(path)
        if trainer.global_step == 4:
            # Rank 0 writes, and may be ahead: rank 1 once found a file that the other had been allowed to write.
            assert at_once or this_rank() != 0 or not Path(path).exists()
            allowed.set()

    model = make_model(optimizer=optimizer, sparse=sparse)
    callbacks = [At("on_train_start", start), At("on_train_batch_end", step)]
    trainer = make_trainer(make_strategy("embrace"), callbacks=callbacks, **trainer_arguments)
    trainer.fit(model, loader(5))
    if not at_once and this_rank() == 0:
        assert written_at and written_at[0] >= 4
    return results(model, trainer)


@pytest.mark.parametrize(("optimizer", "sparse"), [("adam", False), ("momentum", True)])
def test_training_goes_on(ranks, tmp_path, optimizer, sparse):
    """The file is the one of a save that training waits for, and training is not disturbed."""
    paths = [tmp_path / name for name in ("at-once.ckpt", "later.ckpt")]
    expected = ranks(2).run(save, str(paths[0]), optimizer, sparse, True)
    assert_same(ranks(2).run(save, str(paths[1]), optimizer, sparse, False), expected)
    at_once, later = (torch.load(path, weights_only=True) for path in paths)
    assert at_once["global_step"] == 2
    for file in (at_once, later):  # AsyncCheckpointIO copies it without versions of modules
        file["state_dict"] = dict(file["state_dict"])
    assert_same(later, at_once)


def fail(folder: str) -> tuple[Any, str]:
    """The folder is taken by a file, and so the first save fails while training goes on; then the next one says so."""
    errors = []

    def step(trainer: Any, _: Any) -> None:
        if trainer.global_step in (1, 3):
            try:
                trainer.save_checkpoint(f"{folder}/file/a.ckpt")
            except RuntimeError as error:
                errors.append(str(error))
        io = trainer.strategy.checkpoint_io
        if trainer.global_step == 2 and this_rank() == 0:
            io._executor.submit(lambda: None).result()  # the first one has been tried

    model = make_model()
    trainer = make_trainer(
        make_strategy("embrace"), callbacks=[At("on_train_batch_end", step)], plugins=[AsyncCheckpointIO()]
    )
    try:
        trainer.fit(model, loader(4))
    except OSError as error:
        return errors, type(error).__name__
    return errors, ""


def test_a_failure_becomes_known(ranks, tmp_path):
    """Every rank hears of it at the next save, and rank 0, as in any strategy, at the end."""
    (tmp_path / "file").write_bytes(b"")
    outcomes = ranks(2).run(fail, str(tmp_path))
    for errors, _ in outcomes:  # the first save may know of its own failure
        assert errors and all("rank 0" in error for error in errors), outcomes
    assert outcomes[0][0] == outcomes[1][0]
    assert outcomes[0][1] and not outcomes[1][1]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(PARTIAL)] == []
