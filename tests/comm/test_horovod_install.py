"""What a user reads who asks for Horovod and has none that works."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

import lightning_embrace
import lightning_embrace.pytorch_lightning
from lightning_embrace.comm import horovod_install
from lightning_embrace.comm.horovod_install import HorovodUnavailableError, load_horovod

COMMAND = f"{sys.executable} -m lightning_embrace.horovod_build"


def broken(error: Exception) -> Callable[[str], Any]:
    def load(_: str) -> Any:
        raise error

    return load


def test_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_install, "find_spec", lambda _: None)
    with pytest.raises(HorovodUnavailableError, match="is not installed") as raised:
        load_horovod()
    assert str(raised.value).endswith(COMMAND)


@pytest.mark.parametrize(
    "error", [ImportError("undefined symbol: _ZN3c10"), OSError("libtorch.so"), RuntimeError("built without PyTorch")]
)
def test_it_was_built_for_another_torch(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Whatever kind of error the loader makes of it; its words are kept."""
    monkeypatch.setattr(horovod_install, "find_spec", lambda _: object())
    monkeypatch.setattr(horovod_install, "import_module", broken(error))
    with pytest.raises(HorovodUnavailableError, match="built for another torch") as raised:
        load_horovod()
    assert str(error) in str(raised.value) and str(raised.value).endswith(COMMAND)


def test_it_knows_neither_gloo_nor_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    horovod = types.SimpleNamespace(gloo_built=lambda: False, mpi_built=lambda: False)
    monkeypatch.setattr(horovod_install, "find_spec", lambda _: object())
    monkeypatch.setattr(horovod_install, "import_module", lambda _: horovod)
    with pytest.raises(HorovodUnavailableError, match="neither Gloo nor MPI"):
        load_horovod()


@pytest.mark.parametrize("package", [lightning_embrace, lightning_embrace.pytorch_lightning], ids=lambda p: p.__name__)
def test_the_strategy_says_it_at_once(monkeypatch: pytest.MonkeyPatch, package: Any) -> None:
    """When it is made, as the error that Lightning's users know; with "torch" nobody asks for Horovod."""
    monkeypatch.setattr(horovod_install, "find_spec", lambda _: None)
    strategy = package.EmbRaceStrategy
    error = strategy.namespace.get_fabric("utilities.exceptions.MisconfigurationException")
    with pytest.raises(error, match="Horovod is not installed"):
        strategy(communication="horovod")
    strategy(communication="torch")


def test_another_word() -> None:
    with pytest.raises(ValueError, match=r"communication='mpi'\): allowed are 'torch', 'horovod'"):
        lightning_embrace.EmbRaceStrategy(communication="mpi")  # type: ignore[arg-type]
