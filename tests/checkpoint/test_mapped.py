"""Files that are mapped instead of read."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from lightning_embrace.checkpoint.archive import can_leave_room, write_archive
from lightning_embrace.checkpoint.hole import Hole
from lightning_embrace.checkpoint.mapped import load_mapped


def saved(path: Path) -> dict:
    """A checkpoint with a table, its optimizer state, and more of the table's shape where it is not to be mapped."""
    table = torch.arange(20.0).view(4, 5)
    model = torch.nn.Sequential(torch.nn.Embedding(4, 5, _weight=table), torch.nn.BatchNorm1d(5))
    state = {0: {"exp_avg": table + 1, "step": torch.tensor(3.0), "rows": table.to_sparse(1)}, 1: {"exp_avg": table[0]}}
    checkpoint = {
        "state_dict": model.state_dict(),
        "optimizer_states": [{"state": state, "param_groups": [{"params": [0, 1], "betas": (0.9, 0.99)}]}],
        "callbacks": {"Mine": {"table": table + 2, "list": [table, 1, "a"]}},
        "epoch": 3,
    }
    torch.save(checkpoint, path)
    return checkpoint


def same(ours: object, theirs: object) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours.to_dense(), theirs.to_dense())
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        assert getattr(ours, "_metadata", None) == getattr(theirs, "_metadata", None)
        for key in theirs:
            same(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for left, right in zip(ours, theirs):
            same(left, right)
    else:
        assert ours == theirs


@pytest.mark.parametrize("weights_only", [True, False, None])
def test_load_mapped(tmp_path: Path, weights_only: bool | None) -> None:
    """What is there is what was saved, with the metadata that modules look at; what stays in the file shows that the
    file has been written to, and everything else does not."""
    path = tmp_path / "file.ckpt"
    expected = saved(path)
    loaded, mapped = load_mapped(str(path), lambda tensor: tensor.shape == (4, 5), weights_only)
    same(loaded, expected)
    position = path.read_bytes().index(torch.arange(20.0).numpy().tobytes())
    with path.open("r+b") as file:  # the weight's storage comes first
        file.seek(position)
        file.write(b"\0" * 80)
    assert torch.equal(loaded["state_dict"]["0.weight"], torch.zeros(4, 5))
    loaded["state_dict"]["0.weight"].add_(1)  # and not the other way round
    mapped.let_go(loaded["state_dict"]["0.weight"])
    assert torch.equal(loaded["state_dict"]["0.weight"], torch.ones(4, 5)) and path.read_bytes()[position] == 0
    same({k: v for k, v in loaded.items() if k == "callbacks"}, {"callbacks": expected["callbacks"]})
    same(loaded["optimizer_states"][0]["state"][1], expected["optimizer_states"][0]["state"][1])


@pytest.mark.skipif(not can_leave_room(), reason="torch writes no records without content before 2.6")
def test_more_than_there_is_memory(tmp_path: Path) -> None:
    """Twice what the machine has: only what is looked at is read, and it goes again."""
    count = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    path = tmp_path / "file.ckpt"
    with path.open("w+b") as file:  # never filled: the file system has nothing of it
        write_archive(file, {"state_dict": {"w": Hole.of("w", "", 0, (count,), torch.float32)}})  # type: ignore[arg-type]
    assert path.stat().st_size > 4 * count and path.stat().st_blocks < 1000
    content, mapped = load_mapped(str(path), lambda _: True, True)
    weight = content["state_dict"]["w"]
    assert weight.shape == (count,) and weight[:: count // 100].sum() == 0
    resident = status("VmRSS")
    assert weight[: 64 << 20].sum() == 0 and status("VmRSS") > resident + (128 << 20)
    mapped.let_go(weight)
    kind = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout.strip()
    assert kind == "tmpfs" or status("VmRSS") < resident + (128 << 20)  # which is memory itself


def status(name: str) -> int:
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:")]
    return int(line.split()[1]) << 10
