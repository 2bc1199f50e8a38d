"""``python -m lightning_embrace consolidate DIR FILE``, and what it says when it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lightning_embrace.cli
from tests.checkpoint.folders import write
from tests.support.lifecycle import assert_same


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["lightning_embrace", "consolidate", *map(str, arguments)])
    lightning_embrace.cli.main()


def test_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights and states as one process has them, sparse ones too; torch's optimizer loads them."""
    model, optimizer = write(tmp_path / "x.ckpt", hyper_parameters={"rows": 7})
    run(monkeypatch, tmp_path / "x.ckpt", tmp_path / "new" / "file.ckpt")
    assert capsys.readouterr().out == f"{tmp_path / 'new' / 'file.ckpt'} is written.\n"
    checkpoint = torch.load(tmp_path / "new" / "file.ckpt", weights_only=True)
    assert list(checkpoint["state_dict"]) == list(model.state_dict())
    assert_same(dict(checkpoint["state_dict"]), dict(model.state_dict()), tolerance=0.0)
    assert checkpoint["hyper_parameters"] == {"rows": 7} and checkpoint["global_step"] == 2
    wanted = optimizer.state_dict()
    assert wanted["state"][0]["momentum_buffer"].is_sparse
    assert_same(checkpoint["optimizer_states"], [wanted], tolerance=0.0)
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])


@pytest.mark.parametrize("what", ["no folder", "a file", "partial", "exists", "no checkpoint"])
def test_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """One sentence, exit code 1, and no file."""
    folder, file = tmp_path / "x.ckpt", tmp_path / "file.ckpt"
    if what == "a file":
        folder.write_text("a")
    elif what == "no checkpoint":
        folder.mkdir()
    elif what != "no folder":
        write(folder)
    if what == "partial":
        (folder / "__0_0.distcp").unlink()
    if what == "exists":
        file.write_text("mine")
    with pytest.raises(SystemExit) as raised:
        run(monkeypatch, folder, file)
    said = capsys.readouterr().err
    assert raised.value.code == 1 and said.startswith("python -m lightning_embrace consolidate: ")
    words = {
        "no folder": f"{folder} does not exist",
        "a file": "is a file, and not a sharded checkpoint",
        "partial": "it is not whole (__0_0.distcp is missing)",
        "exists": f"{file} exists, and is left as it is",
        "no checkpoint": "it was not finished",
    }
    assert words[what] in said
    assert (file.read_text() == "mine") if what == "exists" else not file.exists()


def test_objects_need_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hyperparameters of other classes are read with ``--trusted``."""
    write(tmp_path / "x.ckpt", hyper_parameters={"path": _Mine()})
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "x.ckpt", tmp_path / "file.ckpt")
    assert "cannot be read" in capsys.readouterr().err
    run(monkeypatch, tmp_path / "x.ckpt", tmp_path / "file.ckpt", "--trusted")
    assert torch.load(tmp_path / "file.ckpt", weights_only=False)["hyper_parameters"]["path"] == _Mine()


class _Mine:
    """A class that nobody else knows."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mine)

    __hash__ = None  # type: ignore[assignment]
