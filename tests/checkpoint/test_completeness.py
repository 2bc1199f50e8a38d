"""What is missing, cut off or changed in a folder is found before anything is read from it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_embrace.checkpoint import sharded
from lightning_embrace.checkpoint.agreement import CheckpointError
from lightning_embrace.checkpoint.completeness import MARK, check_whole, last_whole
from lightning_embrace.checkpoint.replacing import unfinished
from lightning_embrace.checkpoint.sharded import check_folder, check_shared
from tests.checkpoint.folders import write

NAMES = [".metadata", "__0_0.distcp", "embrace.json", "meta.pt"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "x.ckpt"
    write(path)
    return path


def test_whole(whole: Path) -> None:
    """It has four files; whoever shares the work finds it whole too."""
    assert sorted(p.name for p in whole.iterdir()) == NAMES
    for parts in (0, 1, 2, 5):
        for part in range(parts or 1):
            check_whole(whole, part, parts)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def turn(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def check_spoilt(path: Path, spoil: Callable[[Path], None], name: str, said: str) -> None:
    spoil(path / name)
    with pytest.raises(CheckpointError, match=said):
        check_folder(path)


@pytest.mark.parametrize("name", [n for n in NAMES if n != MARK])
@pytest.mark.parametrize(
    ("how", "said"), [("missing", "is missing"), ("cut", "bytes of"), ("turned", "checksum differs")]
)
def test_spoilt(whole: Path, tmp_path: Path, name: str, how: str, said: str) -> None:
    """Every file of the list, in every way; the message names it, and the whole one beside it."""
    path, other = (Path(shutil.copytree(whole, tmp_path / n)) for n in ("spoilt.ckpt", "other.ckpt"))
    check_spoilt(path, {"missing": Path.unlink, "cut": cut, "turned": turn}[how], name, f"{name} .*{said}")
    with pytest.raises(CheckpointError, match=f"The last whole checkpoint in its folder is {other}"):
        check_folder(path)


def test_a_turned_bit_is_one_processs_to_find(whole: Path, tmp_path: Path) -> None:
    """The files are shared out: one of the parts finds it, and only one."""
    path = Path(shutil.copytree(whole, tmp_path / "x.ckpt"))
    turn(path / "__0_0.distcp")
    found = 0
    for part in range(3):
        try:
            check_whole(path, part, 3)
        except CheckpointError:
            found += 1
    assert found == 1
    check_shared(path, 2)  # sizes alone


@pytest.mark.parametrize("names", [[MARK], [MARK, ".metadata"], [MARK, "meta.pt"], [MARK, ".metadata", "meta.pt"]])
def test_without_the_list(whole: Path, tmp_path: Path, names: list[str]) -> None:
    """A folder of Lightning's has none: it is whole if what describes it is there. One that was not finished is not."""
    path = Path(shutil.copytree(whole, tmp_path / "x.ckpt"))
    for name in names:
        (path / name).unlink()
    if names == [MARK]:
        check_folder(path)
        check_spoilt(path, cut, "__0_0.distcp", "__0_0.distcp has .* bytes of")
        check_spoilt(path, Path.unlink, "__0_0.distcp", "__0_0.distcp is missing")
    else:
        with pytest.raises(CheckpointError, match="it was not finished"):
            check_folder(path)


@pytest.mark.parametrize("content", ["", "[]", '{"files": 3}', '{"files": {"a": {"bytes": 1}}}', "\x00"])
def test_a_list_that_is_damaged(whole: Path, tmp_path: Path, content: str) -> None:
    """It is said of the list, and not raised as something else."""
    path = Path(shutil.copytree(whole, tmp_path / "x.ckpt"))
    check_spoilt(path, lambda p: p.write_text(content) and None, MARK, "embrace.json is damaged")


def test_last_whole(whole: Path, tmp_path: Path) -> None:
    """The newest of files and folders that can be whole; hidden and unfinished ones are none."""
    assert last_whole(tmp_path) is None
    old = Path(shutil.copytree(whole, tmp_path / "old.ckpt"))
    os.utime(old, (1, 1))
    assert last_whole(tmp_path) == old
    torch.save({"a": 1}, tmp_path / "file.ckpt")
    assert last_whole(tmp_path) == tmp_path / "file.ckpt"
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "file.ckpt").read_bytes()[:100])
    shutil.copytree(whole, unfinished(tmp_path / "x.ckpt"))
    (Path(shutil.copytree(whole, tmp_path / "part.ckpt")) / "meta.pt").unlink()
    assert last_whole(tmp_path) == tmp_path / "file.ckpt"
    assert last_whole(tmp_path, but=tmp_path / "file.ckpt") == old


@pytest.mark.parametrize("moment", ["plan", "write", "finish"])
def test_a_save_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Whole, under its name, with nothing beside it; and the error says what there is."""
    path = tmp_path / "x.ckpt"
    write(path)
    before = {p.name: p.read_bytes() for p in path.iterdir()}

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sharded.Writing, moment, fail)
    with pytest.raises(CheckpointError, match=r"could not be written: OSError: .*No space left"):
        write(path)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    assert list(tmp_path.iterdir()) == [path]
