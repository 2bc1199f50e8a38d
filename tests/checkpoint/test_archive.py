"""Files with holes that were filled are torch.save's."""

from __future__ import annotations

import errno
import io
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace.checkpoint.archive import can_leave_room, write_archive
from lightning_embrace.checkpoint.filling import fill
from lightning_embrace.checkpoint.hole import Hole
from tests.checkpoint.test_hole import make_hole
from tests.support.lifecycle import assert_same

pytestmark = pytest.mark.skipif(not can_leave_room(), reason="torch writes no records without content before 2.6")


def content(tables: list[Any]) -> dict[str, Any]:
    """A checkpoint of Lightning's in small: one table twice, an optimizer state, and other things between them."""
    dense = nn.Linear(3, 2)
    state = OrderedDict({"a.weight": tables[0], **dense.state_dict(prefix="dense."), "b.weight": tables[0]})
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    states = {0: {"step": torch.tensor(3.0), "exp_avg": tables[1]}, 1: {"exp_avg": torch.ones(2, 3)}}
    ids = torch.tensor([[0, 2]])
    sparse = torch.sparse_coo_tensor(ids, torch.ones(2, 6), (4, 6), is_coalesced=True, check_invariants=False)
    return {
        "epoch": 1,
        "state_dict": state,
        "optimizer_states": [{"state": states, "param_groups": [{"params": [0, 1], "betas": (0.9, 0.99)}]}],
        "more": [tables[2], torch.empty(0), sparse, dense.weight[:, 1], "a", None],
    }


def whole(hole: Hole) -> Tensor:
    return torch.randn(hole.shape, generator=torch.Generator().manual_seed(hole.number)).to(hole.dtype)


HOLES = [(4, 6, torch.float32), (37, 6, torch.float64), (5, 3, torch.bfloat16)]


def write_both(folder: Path, pieces: int = 2) -> tuple[Path, Path]:
    """A file that was filled, and torch.save's of the same values."""
    holes = [make_hole(*shape, number=number) for number, shape in enumerate(HOLES)]
    torch.manual_seed(1)
    ours, theirs = folder / "ours.ckpt", folder / "theirs.ckpt"
    with ours.open("w+b") as file:
        rooms = write_archive(file, content(holes))  # type: ignore[arg-type]
        assert [hole.number for hole, _ in rooms] == [0, 1, 2]
        for hole, room in rooms:
            fill(file, room, whole(hole).split(pieces))  # type: ignore[arg-type]
    torch.manual_seed(1)
    buffer = io.BytesIO()
    torch.save(content([whole(hole) for hole in holes]), buffer)
    theirs.write_bytes(buffer.getvalue())
    return ours, theirs


def test_same_archive(tmp_path: Path) -> None:
    """The same records with the same contents and checksums at the same places, which zip tools find in order."""
    files = write_both(tmp_path)
    assert files[0].stat().st_size == files[1].stat().st_size
    seen = []
    for path in files:
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            records = [(i.filename, i.header_offset, i.file_size, i.CRC) for i in archive.infolist()]
            # a number that torch makes of the checksums that it knows, and logs
            seen.append([(*r, archive.read(r[0])) for r in records if not r[0].endswith("serialization_id")])
    assert len(seen[0]) > 8 and seen[0] == seen[1]


@pytest.mark.parametrize(
    "options", [{"weights_only": True}, {"weights_only": True, "mmap": True}, {"weights_only": False}]
)
def test_torch_load(tmp_path: Path, options: dict[str, Any]) -> None:
    """What is read is what is read of torch.save's file, with one storage for what was one table."""
    ours, theirs = (torch.load(path, **options) for path in write_both(tmp_path))
    assert_same(ours, theirs)
    state = ours["state_dict"]
    assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr()


def test_without_holes(tmp_path: Path) -> None:
    """Then it is torch.save's file, byte by byte."""
    value = content([torch.ones(2, 2), torch.zeros(3), torch.ones(1)])
    path, buffer = tmp_path / "file", io.BytesIO()
    with path.open("w+b") as file:
        assert write_archive(file, value) == []  # type: ignore[arg-type]
    torch.save(value, buffer)
    assert path.read_bytes() == buffer.getvalue()


def test_a_sparse_state(tmp_path: Path) -> None:
    """Its rows are filled in, and it is the sparse tensor that torch saves."""
    ids, values = torch.tensor([1, 4, 7]), torch.randn(3, 6)
    path = tmp_path / "file"
    with path.open("w+b") as file:
        hole = Hole.of("words", "", 0, (9, 6), torch.float32, ids_U=ids)
        rooms = write_archive(file, {"a": hole})  # type: ignore[arg-type]
        fill(file, rooms[0][1], values.split(2))  # type: ignore[arg-type]
    sparse = torch.sparse_coo_tensor(ids.unsqueeze(0), values, (9, 6), is_coalesced=True, check_invariants=False)
    buffer = io.BytesIO()
    torch.save({"a": sparse}, buffer)
    assert path.stat().st_size == len(buffer.getvalue())
    loaded = torch.load(path, weights_only=True)["a"]
    assert loaded.is_coalesced() and torch.equal(loaded.indices()[0], ids) and torch.equal(loaded.values(), values)


def test_strides_and_twins(tmp_path: Path) -> None:
    """A tensor that is not contiguous is as it was, and two holes of one number are one storage."""
    values = torch.arange(24.0).view(4, 6).t()
    holes = [Hole.of("w", "", 3, (6, 4), torch.float32, (1, 6)) for _ in range(2)]
    ours, theirs = tmp_path / "ours", io.BytesIO()
    with ours.open("w+b") as file:
        [(hole, room)] = write_archive(file, holes)  # type: ignore[arg-type]
        assert hole.number == 3
        fill(file, room, values.t().reshape(-1).split(5))  # type: ignore[arg-type]
    torch.save([values, values.detach()], theirs)
    assert ours.stat().st_size == len(theirs.getvalue())
    first, second = torch.load(ours, weights_only=True)
    assert torch.equal(first, values) and first.stride() == (1, 6) and first.data_ptr() == second.data_ptr()


def test_an_empty_table(tmp_path: Path) -> None:
    """It has no room, and needs none."""
    path = tmp_path / "file"
    with path.open("w+b") as file:
        assert write_archive(file, {"w": make_hole(0, 6)}) == []  # type: ignore[arg-type]
    assert torch.load(path, weights_only=True)["w"].shape == (0, 6)


class Full(io.BytesIO):
    """A disk of so many bytes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_disk_full() -> None:
    """The error is the disk's, wherever it strikes, and it does not pass through torch's C++ code."""
    written = io.BytesIO()
    write_archive(written, content([make_hole(number=n) for n in range(3)]))
    size = len(written.getvalue())
    for room in range(0, size, 397):
        with pytest.raises(OSError, match="No space left"):
            write_archive(Full(room), content([make_hole(number=n) for n in range(3)]))


def test_what_cannot_be_pickled() -> None:
    """The error is the pickler's."""
    with pytest.raises((AttributeError, TypeError, RuntimeError), match=r"pickle|local"):
        write_archive(io.BytesIO(), {"a": make_hole(), "b": lambda: None})


def test_all_pieces_are_taken() -> None:
    """Also when the disk is full: other ranks send them."""
    taken = []

    def pieces() -> Any:
        for number in range(4):
            taken.append(number)
            yield torch.ones(2, 2)

    holes = write_archive(io.BytesIO(), {"a": make_hole()})
    with pytest.raises(OSError, match="No space left"):
        fill(Full(0), holes[0][1], pieces())
    assert taken == [0, 1, 2, 3]
