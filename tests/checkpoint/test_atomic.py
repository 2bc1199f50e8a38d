"""Files that are there as a whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_embrace.checkpoint.atomic import PARTIAL, local_path, written_whole


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    """Until then the old one is there; its folder is made."""
    path = tmp_path / "new" / "a.ckpt"
    for content in (b"first", b"second"):
        with written_whole(str(path)) as file:
            file.write(content)
            file.flush()
            before = path.read_bytes() if path.exists() else None
            assert before == (None if content == b"first" else b"first")
            assert len([n for n in names(path.parent) if n.startswith(PARTIAL)]) == 1
        assert path.read_bytes() == content and names(path.parent) == ["a.ckpt"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError()])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    """And nothing else."""
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"old")

    def fail() -> None:
        with written_whole(str(path)) as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert path.read_bytes() == b"old" and names(tmp_path) == ["a.ckpt"]


def test_a_folder_of_that_name_stays(tmp_path: Path) -> None:
    """A sharded checkpoint is not overwritten by a file."""
    (tmp_path / "a.ckpt").mkdir()
    (tmp_path / "a.ckpt" / "part").write_bytes(b"1")
    with pytest.raises(OSError), written_whole(str(tmp_path / "a.ckpt")) as file:  # noqa: PT011
        file.write(b"new")
    assert names(tmp_path) == ["a.ckpt"] and names(tmp_path / "a.ckpt") == ["part"]


def test_what_a_killed_run_has_left(tmp_path: Path) -> None:
    """It is removed by the next write to that path, and by no other; Lightning does not take it for a checkpoint."""
    path, other = tmp_path / "hpc_ckpt_3.ckpt", tmp_path / "last.ckpt"
    for target in (path, other):
        child = os.fork()
        if child == 0:
            with written_whole(str(target)) as file:
                file.write(b"half")
                file.flush()
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = names(tmp_path)
    assert len(left) == 2 and all(name.startswith(PARTIAL) for name in left)
    assert not any("ckpt" in name or "last" in name for name in left)
    with written_whole(str(path)) as file:
        file.write(b"whole")
    assert names(tmp_path) == sorted(["hpc_ckpt_3.ckpt", *(n for n in names(tmp_path) if n.startswith(PARTIAL))])
    assert len(names(tmp_path)) == 2
    with written_whole(str(other)) as file:
        file.write(b"whole")
    assert names(tmp_path) == ["hpc_ckpt_3.ckpt", "last.ckpt"]


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files on this machine in whatever way they are written, and others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert local_path(tmp_path / "a.ckpt") == str(tmp_path / "a.ckpt")
    assert local_path("b/a.ckpt") == str(tmp_path / "b/a.ckpt")
    assert local_path("file:///b/a.ckpt") == "/b/a.ckpt"
    assert local_path("~/a.ckpt") == "/home/me/a.ckpt"
    assert local_path("memory://a.ckpt") is None
