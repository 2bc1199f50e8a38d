"""Ends of training that are none: an exception on one rank, Ctrl-C, SIGTERM, and ranks that do different things."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import nn

from lightning_embrace.refusals import check_model
from lightning_embrace.tables import headers
from tests.support.lifecycle import (
    At,
    Whole,
    assert_same,
    loader,
    make_model,
    make_strategy,
    make_trainer,
    results,
    this_rank,
)
from tests.support.models import batches


@pytest.fixture
def broken(ranks):
    """Workers whose process groups are good for nothing afterwards."""
    used = []

    def get(world_size: int) -> Any:
        used.append(ranks(world_size))
        return used[-1]

    yield get
    for pool in used:
        pool.stop()


def caught(call: Any, *arguments: Any, **named: Any) -> list[tuple[str, str]]:
    """The exception of a call and those before it, the last one first, as type and text."""
    chain: list[tuple[str, str]] = []
    try:
        call(*arguments, **named)
    except BaseException as error:
        current: BaseException | None = error
        while current is not None:
            chain.append((type(current).__name__, str(current)))
            current = current.__cause__ or current.__context__
    return chain


def raise_on_rank_1(error: type[BaseException]) -> Any:
    def act(trainer: Any, module: Any) -> None:
        if this_rank() == 1:
            raise error("stepped on a rake")

    return act


def one_fails(folder: str, hook: str, error: type[BaseException], save: bool) -> Any:
    """Rank 1 fails at its fourth step; what each rank sees, and what it can do with Trainer and model afterwards."""
    model = make_model()
    callbacks: list[Any] = [At(hook, raise_on_rank_1(error), count=4)]
    if save:
        callbacks += [ModelCheckpoint(folder, "{step}", every_n_train_steps=2), OnExceptionCheckpoint(folder)]
    trainer = make_trainer(make_strategy("embrace"), max_epochs=3, callbacks=callbacks, enable_checkpointing=True)
    fit = caught(trainer.fit, model, loader(6), loader(2))
    ids = batches(1, 1)[0][0]["ids"]
    after = {
        "forward": caught(model, ids),
        "weight": caught(lambda: model.words.weight),
        "state_dict": caught(model.state_dict),
        "load": caught(lambda: model.load_state_dict(make_model().state_dict())),
        "save": caught(trainer.save_checkpoint, f"{folder}/late.ckpt"),
        "fit": caught(check_model, model),
    }
    return fit, after


@pytest.mark.parametrize(
    ("hook", "error", "save"),
    [
        ("on_train_batch_start", ValueError, True),
        ("on_before_zero_grad", KeyboardInterrupt, True),
        ("on_train_batch_end", ValueError, False),
    ],
)
def test_one_rank_fails(broken, tmp_path, hook, error, save):
    """Nothing is saved or gathered, every message says what to do, and nobody waits for the timeout."""
    for rank, (fit, after) in enumerate(broken(2).run(one_fails, str(tmp_path), hook, error, save, timeout=60)):
        names = [name for name, _ in fit]
        if save:
            assert names[0] == "RuntimeError"
            assert "nothing is saved. The last whole checkpoint is " + str(tmp_path / "step=2.ckpt") in fit[0][1]
        elif error is KeyboardInterrupt and rank == 1:
            assert names[0] == "SystemExit"
        else:
            assert names[0] == (error.__name__ if rank == 1 else "RankFailedError")
        assert (error.__name__ if rank == 1 else "RankFailedError") in names
        if rank == 0:
            assert any("rank 1 failed" in text and "stepped on a rake" in text for _, text in fit)
        for action in ("forward", "weight", "state_dict", "load"):
            name, text = after[action][0]
            assert (name, "'words' is still sharded" in text) == ("RuntimeError", True), (action, after[action])
        assert "nothing is saved" in after["save"][0][1]
        assert after["fit"][0][0] == "ValueError"
        assert "Build the model anew" in after["fit"][0][1]
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == (["step=2.ckpt"] if save else [])


def alone_fails(folder: str) -> Any:
    """With one rank the tables are whole again whatever happened."""
    model = make_model()
    callbacks = [At("on_train_batch_end", lambda *_: 1 / 0, count=2), OnExceptionCheckpoint(folder)]
    trainer = make_trainer(make_strategy("embrace"), 1, callbacks=callbacks, enable_checkpointing=True)
    chain = caught(trainer.fit, model, loader(3, 0, 1))
    assert chain[0][0] == "ZeroDivisionError"
    assert type(model.words) is nn.Embedding
    saved = torch.load(f"{folder}/on_exception.ckpt", weights_only=True)
    assert_same(saved["state_dict"], model.state_dict())
    trainer.save_checkpoint(f"{folder}/late.ckpt")


def test_one_rank_alone_fails(ranks, tmp_path):
    """A single rank saves on an exception, as it would under ``ddp``."""
    ranks(1).run(alone_fails, str(tmp_path))


def sigterm(strategy: str, folder: str) -> Any:
    """Every rank gets SIGTERM, as from torchrun or from Lightning's launcher, at its fourth step."""
    handler = signal.getsignal(signal.SIGTERM)
    model = make_model()
    stop = At("on_train_batch_start", lambda *_: os.kill(os.getpid(), signal.SIGTERM), count=4)
    trainer = make_trainer(
        make_strategy(strategy),
        max_epochs=3,
        callbacks=[stop, OnExceptionCheckpoint(folder)],
        enable_checkpointing=True,
    )
    chain = caught(trainer.fit, model, loader(6))
    signal.signal(signal.SIGTERM, handler)
    model.loss(batches(1, 1)[0][0])
    return chain, results(model, trainer)


def test_sigterm(ranks, tmp_path):
    """All ranks stop at the same step: the checkpoint is DDP's, the model is whole, and nobody hangs."""
    runs = {}
    for strategy in ("ddp", "embrace"):
        runs[strategy] = ranks(2).run(sigterm, strategy, str(tmp_path / strategy))
    for (chain, ours), (_, theirs) in zip(runs["embrace"], runs["ddp"]):
        assert [name for name, _ in chain] == ["SIGTERMException"]
        assert len(ours["losses"]) == 4
        assert_same(ours, theirs)
    files = [torch.load(tmp_path / s / "on_exception.ckpt", weights_only=True) for s in ("embrace", "ddp")]
    assert_same(files[0]["state_dict"], files[1]["state_dict"])
    assert_same(files[0]["optimizer_states"], files[1]["optimizer_states"])


class Quiet(Whole):
    """Logs nothing: no collective of Lightning's own stands between the ranks' ways."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


def apart(case: str, cls: Any, timeout: float) -> Any:
    """Rank 1 does alone what all must do together."""
    headers.NOTE_SECONDS = 1.0
    gather = At(
        "on_train_batch_end" if case == "late" else "on_before_zero_grad",
        lambda t, _: this_rank() == 1 and t.strategy.full_state_dict(),
        count=2,
    )
    strategy = make_strategy("embrace", timeout=timedelta(seconds=timeout))
    trainer = make_trainer(strategy, callbacks=[gather])
    with contextlib.redirect_stderr(io.StringIO()) as notes:
        chain = caught(trainer.fit, make_model(cls=cls), loader(5), loader(1))
    return " ".join(text for _, text in chain), notes.getvalue()


def test_ranks_do_different_things(broken):
    """One rank saves alone inside a step: the exchanges of the others meant something else."""
    for text, _ in broken(2).run(apart, "inside", Quiet, 60.0, timeout=60):
        assert "rank 0 is in a training step" in text
        assert "rank 1 gathers the state of the tables (for a checkpoint, or `full_state_dict()`)" in text
        assert "the same number of batches" in text


def test_ranks_wait_for_each_other(broken):
    """One rank saves alone between steps; the others wait in a collective of Lightning's.

    That hangs under ``ddp``. Here a note says what is waited for, and the end comes after ``timeout``.
    """
    act = "gathers the state of the tables"
    (reason, _), (text, notes) = broken(2).run(apart, "late", Whole, 5.0, timeout=60)
    assert f"This rank {act}" in text
    assert f"rank 1 {act}" in notes and "has waited 1 s" in notes
    for message in (reason, text, notes):
        assert "the same number of batches" in message
