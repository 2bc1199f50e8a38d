"""What torch.distributed.checkpoint stores is read without pickles that could run code."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from lightning_embrace.checkpoint.agreement import CheckpointError
from lightning_embrace.checkpoint.sharded import read_folder
from lightning_embrace.checkpoint.stored import missing_parts, read_metadata
from tests.checkpoint.folders import write


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.path}",)


def whole(path: Path, weights_only: bool | None = True) -> dict[str, object]:
    return read_folder(path, lambda sizes: lambda *_: None, weights_only)


@pytest.mark.parametrize("weights_only", [True, False])
def test_metadata_runs_nothing(tmp_path: Path, weights_only: bool) -> None:
    """It is a pickle, and whatever does not describe a tensor is refused, named, and not run."""
    write(tmp_path / "x.ckpt")
    trace = tmp_path / "trace"
    (tmp_path / "x.ckpt" / ".metadata").write_bytes(pickle.dumps(Evil(trace)))
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged: it refers to posix.system"):
        whole(tmp_path / "x.ckpt", weights_only)
    assert not trace.exists()


@pytest.mark.parametrize("content", [b"", b"abc", pickle.dumps(3), pickle.dumps({"a": 1})[:5]])
def test_damaged_metadata(tmp_path: Path, content: bytes) -> None:
    """One error, whatever is wrong."""
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("place", ["optimizer", "hyperparameters"])
def test_objects_need_trust(tmp_path: Path, place: str) -> None:
    """Objects of other classes are read where `weights_only=False` says so, and are not run before."""
    trace = tmp_path / "trace"
    more = {"hyper_parameters": {"evil": Evil(trace)}} if place == "hyperparameters" else {}
    path = tmp_path / "x.ckpt"
    if place == "optimizer":
        from lightning_embrace.checkpoint.sharded import write_folder
        from tests.checkpoint.folders import ALONE, checkpoint_of, trained

        model, optimizer = trained()
        optimizer.param_groups[0]["mine"] = Evil(trace)
        write_folder(ALONE, path, checkpoint_of(model, optimizer), None)
    else:
        write(path, **more)
    with pytest.raises(pickle.UnpicklingError):
        whole(path)
    assert not trace.exists()
    whole(path, weights_only=False)
    assert trace.exists()


def test_tensors_are_no_objects(tmp_path: Path) -> None:
    """A table and its optimizer state are read with `weights_only` even by who trusts the folder."""
    path = tmp_path / "x.ckpt"
    write(path)
    loads, seen = torch.load, []

    def noted(*arguments: object, **named: object) -> object:
        seen.append(named["weights_only"])
        return loads(*arguments, **named)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch, "load", noted)
        whole(path, weights_only=False)
    tensors = sum(hasattr(m, "chunks") for m in read_metadata(path).state_dict_metadata.values())
    assert seen.count(True) == tensors > 3 and False in seen


def test_missing_parts(tmp_path: Path) -> None:
    """Blocks that do not make up a whole tensor are found."""
    write(tmp_path / "x.ckpt")
    shutil.copy(tmp_path / "x.ckpt" / ".metadata", tmp_path / ".metadata")
    metadata = read_metadata(tmp_path)
    assert list(missing_parts(metadata)) == []
    metadata.state_dict_metadata["model.0.weight"].chunks.clear()
    assert list(missing_parts(metadata)) == ["model.0.weight"]
