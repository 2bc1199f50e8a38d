"""Ctrl-C and SIGTERM wait for the end of a step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_embrace import CheckpointError
from lightning_embrace.hydra.interrupts import Interrupts
from lightning_embrace.hydra.session import Session
from lightning_embrace.hydra.unit import Unit
from tests.hydra import zoo
from tests.hydra.runs import assert_same, hydra
from tests.hydra.test_saving import Case, fit, rest_of

AT = 3


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Lightning ignores Ctrl-C once it has had one."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Interrupted(zoo.Stack):
    """Is sent signals in a backward, when some blocks have made their step and others have not."""

    def __init__(self, signals: list[int]) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
        self.signals = signals
        self.first.weight.register_hook(self.send)

    def send(self, gradient: Tensor) -> Tensor:
        if len(self.losses) == AT:
            for number in self.signals:
                os.kill(os.getpid(), number)
        return gradient


class Save(Callback):
    """Saves when a fit is interrupted, as OnExceptionCheckpoint does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: Exception | None = None

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        try:
            trainer.save_checkpoint(self.path)
        except CheckpointError as error:
            self.error = error


def interrupted(signals: list[int], path: Path, error: type[BaseException]) -> Save:
    save, case = Save(path), Case(partial(Interrupted, signals))
    with pytest.raises(error):
        fit(case, hydra(device_memory="120KiB"), extra=[save])
    return save


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, SystemExit), (signal.SIGTERM, SIGTERMException)], ids=["SIGINT", "SIGTERM"]
)
def test_the_step_ends_first(number: int, error: type[BaseException], tmp_path: Path) -> None:
    """What is saved then goes on exactly where the run was interrupted."""
    save = interrupted([number], tmp_path / "a.ckpt", error)
    assert save.error is None
    assert torch.load(save.path, weights_only=True)["global_step"] == AT
    quiet = Case(partial(Interrupted, []))
    whole = fit(quiet, "auto")
    assert_same(fit(quiet, hydra(device_memory="120KiB"), from_=str(save.path)), rest_of(whole, AT))


def test_a_handler_of_the_users(tmp_path: Path) -> None:
    """Which ends the process: not within a step."""

    def leave(*_: Any) -> None:
        raise SystemExit(3)

    signal.signal(signal.SIGTERM, leave)
    save = interrupted([signal.SIGTERM], tmp_path / "a.ckpt", SystemExit)
    assert save.error is None and torch.load(save.path, weights_only=True)["global_step"] == AT


def test_twice_is_at_once(tmp_path: Path) -> None:
    """Then the step is torn, and nothing is saved."""
    save = interrupted([signal.SIGINT, signal.SIGINT], tmp_path / "a.ckpt", SystemExit)
    assert "after some blocks and before others" in str(save.error) and not save.path.exists()


@pytest.mark.parametrize("when", ["setup", "teardown"])
def test_while_blocks_move(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is lost between two places."""
    quiet, made = Case(partial(Interrupted, [])), []
    whole = fit(quiet, "auto", max_epochs=1)
    before: dict[str, Tensor] = {}
    move, release = Unit.take_place, Session.release
    armed = [when == "setup"]

    def take_place(unit: Unit, place: str, *rest: Any) -> None:
        if armed and armed[0] and place != unit.place:
            armed.clear()
            os.kill(os.getpid(), signal.SIGINT)
        move(unit, place, *rest)

    def released(session: Session) -> None:
        if armed:
            armed[0] = True
        release(session)

    monkeypatch.setattr(Unit, "take_place", take_place)
    monkeypatch.setattr(Session, "release", released)

    def make() -> Any:
        made.append(quiet.make())
        before.update({k: v.clone() for k, v in made[-1].state_dict().items()})
        return made[-1]

    with pytest.raises(SystemExit):
        fit(Case(make), hydra(device_memory="120KiB"), max_epochs=1)
    assert not armed, "no signal was sent"
    for key, value in made[0].state_dict().items():
        assert torch.equal(value, before[key] if when == "setup" else whole.model[key])


def test_deferred() -> None:
    """Handlers are put back, an exception passes, ignored signals stay ignored, and other threads do not care."""
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    interrupts = Interrupts()

    def fail() -> None:
        with interrupts.deferred():
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == []
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before
    interrupts.deliver()
    interrupts.deliver()
    assert heard == [signal.SIGUSR1]

    def elsewhere() -> None:
        with interrupts.deferred():
            heard.append(0)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert heard[-1] == 0
