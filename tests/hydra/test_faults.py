"""What goes wrong is said, nothing half done is saved, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_embrace import CheckpointError, last_whole_checkpoint
from lightning_embrace.hydra import disk
from tests.hydra import killed, zoo
from tests.hydra.runs import QUIET, assert_same, hydra, refuse_direct_access
from tests.hydra.test_saving import AMID, BATCHES, CASES, Case, fit, rest_of

ADAMW = CASES["adamw"]


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A small disk."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no disk can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Mounts disks of some size, of which nothing is left to others."""
    monkeypatch.setattr(disk, "_SPARE", 0)
    open_: list[Any] = []

    def mount(options: str) -> Path:
        context = mounted(tmp_path / f"mount{len(open_)}", options)
        folder = context.__enter__()
        open_.append(context)
        return folder

    yield mount
    for context in open_:
        context.__exit__(None, None, None)


def spilled(folder: Path, **arguments: Any) -> Any:
    return hydra(device_memory="120KiB", host_memory="4KiB", disk=folder, **arguments)


def test_a_killed_run_leaves_nothing(tmp_path: Path) -> None:
    """And goes on exactly from what it has saved."""
    command = [sys.executable, "-m", "tests.hydra.killed", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = any("ready" in line for line in process.stdout)
    process.kill()
    _, error = process.communicate()
    assert ready, error
    assert list((tmp_path / "disk").iterdir()) == []
    [saved] = (tmp_path / "saved").iterdir()
    assert last_whole_checkpoint(tmp_path / "saved") == str(saved)
    assert torch.load(saved, weights_only=True)["global_step"] == AMID < killed.STEPS
    whole = fit(ADAMW, "auto")
    assert_same(fit(ADAMW, spilled(tmp_path / "disk"), from_=str(saved)), rest_of(whole, AMID))


def test_a_disk_that_is_too_small(small_disk: Callable[[str], Path]) -> None:
    """Refused before training, with the arithmetic; the model is an ordinary one."""
    folder = small_disk("size=64k")
    model = ADAMW.make()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trainer = Trainer(**QUIET, strategy=spilled(folder))
    with pytest.raises(OSError, match=r"[\d.]+ KiB are to be spilled to .*mount0, .* 64 KiB free.*HydraStrategy\(disk"):
        trainer.fit(model, DataLoader(zoo.batches(2), batch_size=None))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert list(folder.iterdir()) == []


def test_a_disk_that_is_filled_meanwhile(small_disk: Callable[[str], Path]) -> None:
    """By others: what was planned was reserved, and training goes on."""
    folder = small_disk("size=1m")

    class Fill(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                descriptor = os.open(folder / "filled", os.O_WRONLY | os.O_CREAT)
                with suppress(OSError):
                    while os.write(descriptor, b"\0" * 4096):
                        pass
                os.close(descriptor)

    assert_same(fit(ADAMW, spilled(folder), extra=[Fill()]), fit(ADAMW, "auto"))
    assert os.listdir(folder) == ["filled"] and os.statvfs(folder).f_bavail > 0  # what was reserved is free again


def test_a_checkpoint_that_does_not_fit(small_disk: Callable[[str], Path], tmp_path: Path) -> None:
    """Nothing of it is written; whoever catches the error goes on training."""
    folder = small_disk("size=140k")
    errors: list[str] = []

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "whole.ckpt")
            if trainer.global_step == 4:
                with pytest.raises(CheckpointError) as caught:
                    trainer.save_checkpoint(folder / "a.ckpt")
                errors.append(str(caught.value))

    assert_same(fit(ADAMW, spilled(tmp_path / "disk"), extra=[Save()]), fit(ADAMW, "auto"))
    [error] = errors
    assert "a.ckpt could not be written: OSError" in error and "No space left on device" in error
    assert error.endswith(f"The last whole one is {tmp_path / 'whole.ckpt'}.")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["read-only", "no folder"])
def test_a_folder_that_cannot_be_written(kind: str, small_disk: Callable[[str], Path], tmp_path: Path) -> None:
    """Said before training, naming the argument; also where a model is built."""
    folder = tmp_path / "file" / "folder"
    if kind == "read-only":
        folder = small_disk("size=1m,ro")
    else:
        folder.parent.touch()

    class Built(zoo.Stack):
        def configure_model(self) -> None:
            self.more = torch.nn.Linear(520, 520)

    for make in (zoo.Stack, Built):
        with pytest.raises(
            OSError, match=r"HydraStrategy\(disk='.*'\): nothing can be written there: (Read-only|Not a)"
        ):
            fit(Case(make), spilled(folder))


def test_a_checkpoint_folder_that_cannot_be_written(small_disk: Callable[[str], Path]) -> None:
    folder = small_disk("size=1m,ro")
    with pytest.raises(CheckpointError, match=r"could not be written: OSError: .*Read-only.*No other was written"):
        fit(ADAMW, hydra(device_memory="120KiB"), into=folder)


class Failing:
    """Writes to the store fail from some moment on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = False
        real = os.pwritev

        def write(*arguments: Any) -> int:
            if self.fails:
                raise OSError(errno.EIO, "the disk is broken")
            return real(*arguments)

        monkeypatch.setattr(os, "pwritev", write)


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_disk_that_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefetch: bool) -> None:
    """The run ends with its error, and nothing is saved from there on, not even afterwards."""
    failing = Failing(monkeypatch)

    class Break(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                failing.fails = True
                trainer.save_checkpoint(tmp_path / "whole.ckpt")

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "last.ckpt")

        def on_exception(self, trainer: Any, *_: Any) -> None:
            for _ in range(2):
                with pytest.raises((CheckpointError, OSError)):
                    trainer.save_checkpoint(tmp_path / "broken.ckpt")
            self.trainer = trainer

    callback = Break()
    with pytest.raises(OSError, match="the disk is broken"):
        fit(ADAMW, spilled(tmp_path / "disk", prefetch=prefetch), extra=[callback])
    with pytest.raises(CheckpointError, match=r"Go on from the last whole one: .*whole\.ckpt"):
        callback.trainer.save_checkpoint(tmp_path / "broken.ckpt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "last.ckpt", "whole.ckpt"]
    for name, step in (("last.ckpt", 3), ("whole.ckpt", 3)):
        assert torch.load(tmp_path / name, weights_only=True)["global_step"] == step


class Stumbling(torch.optim.AdamW):
    """Fails amid its fourth step, when some parameters have made it."""

    rest = 10**9

    def step(self, closure: Any = None) -> Any:
        Stumbling.rest -= 1
        if Stumbling.rest == 0:
            raise RuntimeError("stumbled")
        return super().step(closure)


def test_an_optimizer_that_fails(tmp_path: Path) -> None:
    """Nothing is saved, during or after; the next fit says with what it begins, unless a checkpoint is loaded."""

    class Arm(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "whole.ckpt")
                Stumbling.rest = 3

        def on_exception(self, trainer: Any, *_: Any) -> None:
            with pytest.raises(CheckpointError, match=r"Go on from the last whole one: .*whole\.ckpt"):
                trainer.save_checkpoint(tmp_path / "torn.ckpt")

    model = zoo.Stack(partial(Stumbling, lr=0.01))
    trainer = Trainer(**QUIET, strategy=hydra(device_memory="120KiB"), callbacks=[Arm()])
    loader = DataLoader(zoo.batches(BATCHES), batch_size=None)
    with pytest.raises(RuntimeError, match="stumbled"):
        trainer.fit(model, loader)
    assert all(p.isfinite().all() for p in model.parameters())
    with pytest.raises(CheckpointError, match="before others"):
        trainer.save_checkpoint(tmp_path / "torn.ckpt")
    assert [p.name for p in tmp_path.iterdir()] == ["whole.ckpt"]
    trainer.callbacks[:] = []
    with pytest.warns(UserWarning, match="interrupted within an optimizer step"):
        trainer.fit(model, loader)
    trainer.save_checkpoint(tmp_path / "later.ckpt")


class Poisoned(zoo.Stack):
    """Loses its numbers in a step, and leaves one out."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            return None
        return loss * float("nan") if batch_idx == 5 else loss


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_loss_that_is_not_a_number(tier: str, tmp_path: Path) -> None:
    """Trains and saves what plain training does: NaN; and a step that is left out, is."""
    case = Case(partial(Poisoned, lambda parameters: torch.optim.AdamW(parameters, lr=0.01)))
    strategy = spilled(tmp_path / "disk") if tier == "disk" else hydra(device_memory="120KiB")
    whole = fit(case, "auto", into=tmp_path / "plain", max_epochs=1)
    assert_same(fit(case, strategy, into=tmp_path / "ours", max_epochs=1), whole)
    assert whole.model["blocks.0.0.weight"].isnan().all()
    ours, plain = (torch.load(tmp_path / f / "end-epoch=0.ckpt", weights_only=True) for f in ("ours", "plain"))
    for key, value in plain["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][key], value, rtol=0, atol=0, equal_nan=True)


def test_a_disk_without_direct_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The numbers are the same, and it is said once."""
    refuse_direct_access(monkeypatch)
    with caplog.at_level("INFO"):
        ours = fit(ADAMW, spilled(tmp_path / "disk"))
    monkeypatch.undo()
    assert_same(ours, fit(ADAMW, "auto"))
    assert sum("no direct access" in record.getMessage() for record in caplog.records) == 1
