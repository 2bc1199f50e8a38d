"""Files that nobody leaves behind."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lightning_embrace.hydra.nameless import Nameless, remove_stale
from tests.hydra.runs import refuse_direct_access


def test_it_has_no_name(tmp_path: Path) -> None:
    """And can be opened again meanwhile, as mappings do."""
    file = Nameless(tmp_path / "made")
    os.write(file.descriptor, b"abc")
    assert Path(file.path).read_bytes() == b"abc" and list((tmp_path / "made").iterdir()) == []
    file.close()


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A file system without nameless files; while there is something in the list, open files keep their names."""
    real_open, real_unlink, keeping = os.open, Path.unlink, [True]

    def open_(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no")
        return real_open(path, flags, *rest)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if keeping:
            raise OSError(errno.EBUSY, "no")
        real_unlink(path, missing_ok)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(Path, "unlink", unlink)
    return keeping


def test_where_files_have_names(tmp_path: Path, named: list[bool]) -> None:
    """It loses its name at once where it can, else when it is closed; others that live do not lose theirs."""
    first = Nameless(tmp_path)
    [path] = tmp_path.iterdir()
    named.clear()
    second = Nameless(tmp_path)  # removes what is stale: nothing is
    assert list(tmp_path.iterdir()) == [path] and first.path == str(path)
    second.close()
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_has_left(tmp_path: Path, named: list[bool]) -> None:
    """Nobody holds its lock: the next one removes it, and nothing else."""
    pid = os.fork()
    if pid == 0:
        Nameless(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (tmp_path / ".hydra-mine").touch()
    assert len(list(tmp_path.glob("*.pages"))) == 1
    named.clear()
    remove_stale(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [".hydra-mine"]


def test_a_file_system_without_direct_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It falls back, with a name or without."""
    refuse_direct_access(monkeypatch)
    assert not Nameless(tmp_path, direct=True).direct and list(tmp_path.iterdir()) == []
