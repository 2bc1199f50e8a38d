"""Which Horovod is built and which kept wheel is taken; the build itself is `make horovod`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from lightning_embrace.horovod_build import choices, find_wheel, folder_of

SCRIPT = Path(__file__).parents[1] / "lightning_embrace" / "horovod_build.py"
PYTHON = "cp{}{}".format(*sys.version_info[:2])


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(SCRIPT), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_a_kept_wheel_is_taken_for_its_python_and_torch(tmp_path: Path) -> None:
    """By the script, which needs nothing of the package."""
    folder = tmp_path / "lightning_embrace" / f"horovod-0.28.1-{PYTHON}-torch{version('torch').split('+')[0]}"
    folder.mkdir(parents=True)
    wheel = folder / "horovod-0.28.1-x.whl"
    wheel.touch()
    found = run("--wheel", XDG_CACHE_HOME=str(tmp_path))
    assert found.stdout.strip() == str(wheel), found.stderr


def test_a_wheel_of_another_torch_is_not_taken(tmp_path: Path) -> None:
    """It would fail at import. Without a compiler a new one cannot be built, which is said."""
    folder = tmp_path / "lightning_embrace" / f"horovod-0.28.1-{PYTHON}-torch1.0.0"
    folder.mkdir(parents=True)
    (folder / "horovod-0.28.1-x.whl").touch()
    refused = run("--wheel", XDG_CACHE_HOME=str(tmp_path), CXX="no-such-compiler")
    assert refused.returncode != 0 and refused.stdout == ""
    assert "no-such-compiler" in refused.stderr


def test_variants_are_kept_apart() -> None:
    """A wheel with MPI or NCCL must not be taken where the plain one is meant."""
    environments = [{}, {"HOROVOD_WITH_MPI": "1"}, {"HOROVOD_GPU_OPERATIONS": "NCCL"}, {"HOROVOD_NCCL_HOME": "/a/b"}]
    folders = [folder_of(choices(e), "2.13.0+cpu", {"XDG_CACHE_HOME": "/c"}) for e in environments]
    assert len(set(folders)) == len(folders)
    assert all(folder.parent == Path("/c/lightning_embrace") for folder in folders)
    assert folders[0].name == f"horovod-0.28.1-{PYTHON}-torch2.13.0"


@pytest.mark.parametrize(
    ("said", "expected", "absent"),
    [
        ({}, {"HOROVOD_WITH_GLOO": "1", "HOROVOD_WITHOUT_MPI": "1"}, "HOROVOD_WITH_MPI"),
        ({"HOROVOD_WITH_MPI": "1"}, {"HOROVOD_WITH_GLOO": "1", "HOROVOD_WITH_MPI": "1"}, "HOROVOD_WITHOUT_MPI"),
        ({"HOROVOD_WITHOUT_GLOO": "1"}, {"HOROVOD_WITHOUT_GLOO": "1"}, "HOROVOD_WITH_GLOO"),
    ],
)
def test_what_the_user_says_takes_the_place_of_its_opposite(
    said: dict[str, str], expected: dict[str, str], absent: str
) -> None:
    """Horovod refuses to be built both with and without something."""
    chosen = choices({**said, "HOROVOD_CYCLE_TIME": "3", "PATH": "/bin"})
    assert expected.items() <= chosen.items()
    assert absent not in chosen and "HOROVOD_CYCLE_TIME" not in chosen and "PATH" not in chosen


def test_no_wheel_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert find_wheel(tmp_path / "nothing") is None
