"""Signals that stop a run or have it requeued: all ranks take them after the same step, and what they save is whole."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.faults.campaign import FORMATS, read
from tests.support.lifecycle import (
    At,
    assert_same,
    loader,
    make_model,
    make_strategy,
    make_trainer,
    plain,
    results,
    this_rank,
)
from tests.test_interruption_distributed import caught

N = 2


class Slurm(SLURMEnvironment):
    """SLURM's ranks are those of the pool."""

    def __init__(self) -> None:
        self.auto_requeue, self.requeue_signal = True, signal.SIGUSR1

    main_address = property(lambda _: os.environ["MASTER_ADDR"])
    main_port = property(lambda _: int(os.environ["MASTER_PORT"]))
    world_size = staticmethod(lambda: N)
    global_rank = local_rank = staticmethod(this_rank)
    node_rank = staticmethod(lambda: 0)

    def set_world_size(self, size: int) -> None:
        pass

    set_global_rank = set_world_size

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass


def requeued(kind: str, folder: str, number: int | None) -> Any:
    """One rank is told after it has begun its third step that the job is to be requeued."""
    # with this in front of it the path has an `scontrol`
    os.environ.update(PATH=f"{folder}:{os.environ['PATH']}", SLURM_JOB_ID="42")
    before = {n: signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM)}

    def tell(*_: Any) -> None:
        if this_rank() == 1 and number is not None:
            os.kill(os.getpid(), number)

    strategy = make_strategy("embrace", state_dict_type=kind, cluster_environment=Slurm())
    saver = ModelCheckpoint(f"{folder}/saved", "{step}", every_n_train_steps=1, save_top_k=-1)
    model = make_model()
    trainer = make_trainer(
        strategy,
        N,
        callbacks=[At("on_train_batch_start", tell, count=3), saver],
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    callbacks = list(trainer.callbacks)
    trainer.fit(model, loader(5))
    assert trainer.callbacks == callbacks
    assert {n: signal.getsignal(n) for n in before} == before
    return results(model, trainer)


@pytest.mark.parametrize("kind", FORMATS)
def test_requeued(ranks: Any, tmp_path: Path, kind: str) -> None:
    """Lightning's handler saves wherever a rank is, which are different places; here the step is over on all of them.

    One of them need hear it. The job is requeued once, and training goes on until SLURM ends it.
    """
    folder = tmp_path / "told"
    for path in (tmp_path / "not", folder):
        path.mkdir()
        command = path / "scontrol"
        command.write_text(f'#!/bin/sh\necho "$@" >> {path}/calls\n')
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
    expected = ranks(N).run(requeued, kind, str(tmp_path / "not"), None)
    assert_same(ranks(N).run(requeued, kind, str(folder), signal.SIGUSR1), expected)
    assert (folder / "calls").read_text() == "requeue 42\n"
    assert not (tmp_path / "not" / "calls").exists()
    (saved,) = folder.glob("hpc_ckpt_*")
    assert saved.name == "hpc_ckpt_1.ckpt"
    ours, theirs = read(saved), read(folder / "saved" / "step=3.ckpt")
    assert ours["global_step"] == theirs["global_step"] == 3
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(ours[key], theirs[key], key)
    assert ours["loops"]["fit_loop"] == theirs["loops"]["fit_loop"]


def stopped(kind: str, folder: str) -> Any:
    """Rank 0 gets SIGTERM as it begins its fourth step."""
    handler = signal.getsignal(signal.SIGTERM)
    model = make_model()
    stop = At("on_train_batch_start", lambda *_: this_rank() == 0 and os.kill(os.getpid(), signal.SIGTERM), count=4)
    trainer = make_trainer(
        make_strategy("embrace", state_dict_type=kind),
        N,
        callbacks=[stop, OnExceptionCheckpoint(folder), ModelCheckpoint(folder, "mine", save_on_exception=True)],
        enable_checkpointing=True,
    )
    chain = caught(trainer.fit, model, loader(6))
    signal.signal(signal.SIGTERM, handler)
    return [name for name, _ in chain], results(model, trainer)


@pytest.mark.parametrize("kind", FORMATS)
def test_stopped(ranks: Any, tmp_path: Path, kind: str) -> None:
    """Both callbacks that save on exceptions leave the step after which all ranks stopped, whole and alike."""
    outcomes = ranks(N).run(stopped, kind, str(tmp_path))
    assert [names for names, _ in outcomes] == [["SIGTERMException"]] * N
    saved = [read(path) for path in sorted(tmp_path.glob("*.ckpt"))]
    assert [path.name for path in sorted(tmp_path.glob("*.ckpt"))] == ["mine.ckpt", "on_exception.ckpt"]
    for content in saved:
        assert content["global_step"] == 4
        assert_same(plain(dict(content["state_dict"])), outcomes[0][1]["state"])
        assert_same(content["optimizer_states"], outcomes[0][1]["optimizers"])


def failed(kind: str, folder: str) -> Any:
    """Rank 1 raises between two halves of a step: rank 0 may have stepped, or not."""

    def harm(*_: Any) -> None:
        if this_rank() == 1:
            raise ValueError("stepped on a rake")

    model = make_model()
    callbacks = [At("on_before_zero_grad", harm, count=4), OnExceptionCheckpoint(folder)]
    callbacks += [ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_on_exception=True)]
    strategy = make_strategy("embrace", state_dict_type=kind)
    trainer = make_trainer(strategy, N, callbacks=callbacks, enable_checkpointing=True)
    return caught(trainer.fit, model, loader(6))


@pytest.mark.parametrize("kind", FORMATS)
def test_no_step_is_saved_by_half(ranks: Any, tmp_path: Path, kind: str) -> None:
    """After an exception of one rank neither callback saves anything, and the message names what there is."""
    for chain in ranks(N).run(failed, kind, str(tmp_path), timeout=60):
        assert chain[0][0] == "RuntimeError"
        assert f"nothing is saved. The last whole checkpoint is {tmp_path}/step=2.ckpt" in chain[0][1]
    ranks(N).stop()
    assert [path.name for path in tmp_path.iterdir()] == ["step=2.ckpt"]
    assert read(tmp_path / "step=2.ckpt")["global_step"] == 2
