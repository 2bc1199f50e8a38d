"""A finished checkpoint takes the place of an older one; at every moment one of them is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_embrace.checkpoint import replacing
from lightning_embrace.checkpoint.replacing import put_in_place, remove, remove_at_once, replaced, unfinished


class Killed(BaseException):
    """The process ends here."""


def make(path: Path, content: str, kind: str = "folder") -> None:
    if kind == "file":
        path.write_text(content)
    elif kind == "link":
        target = path.with_name("target")
        make(target, content)
        path.symlink_to(target)
    else:
        path.mkdir()
        (path / "a").write_text(content)
        (path / "b").write_text(content)


def content(path: Path) -> set[str]:
    return {f.read_text() for f in path.iterdir()} if path.is_dir() else {path.read_text()}


@pytest.mark.parametrize("old", ["folder", "file", "link", None])
@pytest.mark.parametrize("exchange", [True, False])
def test_put_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str | None, exchange: bool) -> None:
    """Whatever had the name before, on file systems that can exchange names and on others."""
    if not exchange:
        monkeypatch.setattr(replacing, "_exchange", lambda *_: False)
    path = tmp_path / "last.ckpt"
    if old is not None:
        make(path, "old", old)
    make(unfinished(path), "new")
    put_in_place(unfinished(path), path)
    assert content(path) == {"new"} and not path.is_symlink()
    assert {p.name for p in tmp_path.iterdir()} - {"target"} == {"last.ckpt"}
    assert old != "link" or content(tmp_path / "target") == {"old"}, "what a link showed is not ours to remove"


def test_names_cannot_be_exchanged_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no such call; here it has, and another error is not taken for that."""
    make(tmp_path / "one", "1")
    with pytest.raises(OSError, match="No such file"):
        replacing._exchange(tmp_path / "one", tmp_path / "two")
    monkeypatch.setattr(replacing.ctypes, "CDLL", lambda *_, **__: object())
    assert not replacing._exchange(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("exchange", [True, False])
def test_killed_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    """The old one or the new one has its name, complete; or, for one moment without exchange, the old one another."""
    if not exchange:
        monkeypatch.setattr(replacing, "_exchange", lambda *_: False)
    found = []
    for moment in range(20):
        path = tmp_path / str(moment) / "last.ckpt"
        path.parent.mkdir()
        make(path, "old")
        make(unfinished(path), "new")
        with monkeypatch.context() as patches:
            _kill_at(patches, moment)
            try:
                put_in_place(unfinished(path), path)
                break
            except Killed:
                pass
        kept = path if path.exists() else replaced(path)
        found.append((kept.name == "last.ckpt", *content(kept)))
        assert len(list(kept.iterdir())) == 2
    assert len(found) > 3 and (True, "new") in found
    assert exchange == all(named for named, _ in found)


def _kill_at(patches: pytest.MonkeyPatch, moment: int) -> None:
    left = [moment]

    def killing(function: Any) -> Any:
        def inside(*arguments: Any, **named: Any) -> Any:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return function(*arguments, **named)

        return inside

    for owner, name in ((os, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (replacing, "_exchange")):
        patches.setattr(owner, name, killing(getattr(owner, name)))


def test_remove(tmp_path: Path) -> None:
    """Files, folders, links, and nothing; a folder that is removed at once has no name from the first moment on."""
    for kind in ("file", "folder", "link"):
        make(tmp_path / kind, "x", kind)
        remove(tmp_path / kind)
        assert not os.path.lexists(tmp_path / kind)
    remove(tmp_path / "nothing")
    assert content(tmp_path / "target") == {"x"}
    make(tmp_path / "old.ckpt", "old")
    remove_at_once(tmp_path / "old.ckpt")
    assert {p.name for p in tmp_path.iterdir()} == {"target"}


def test_names_are_nobody_elses(tmp_path: Path) -> None:
    """Lightning finds checkpoints by what is in their names."""
    for name in ("last.ckpt", "hpc_ckpt_3.ckpt"):
        for place in (unfinished(tmp_path / name), replaced(tmp_path / name)):
            assert place.parent == tmp_path and place.name.startswith(".")
            assert "last" not in place.name and "ckpt" not in place.name
