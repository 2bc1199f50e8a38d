"""Files that are not what was written."""

from __future__ import annotations

import contextlib
import pickle
import random
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_embrace.checkpoint.agreement import CheckpointError
from lightning_embrace.checkpoint.damage import check_content, check_file, share
from tests.support.lifecycle import assert_same


def write(path: Path, seed: int = 0) -> Path:
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.rand(30, 7, generator=generator) for name in ("words", "tags", "head")}
    torch.save({"state_dict": weights, "global_step": 3, "pytorch-lightning_version": "2.6.0"}, path)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "file.ckpt")


def test_a_whole_file_passes_whoever_looks(file: Path, tmp_path: Path) -> None:
    """Each part comes to the same number, which another content does not."""
    numbers = {check_file(str(file), part, parts) for parts in (1, 2, 5) for part in range(parts)}
    assert len(numbers) == 1 and numbers != {0}
    assert check_file(str(write(tmp_path / "other.ckpt", seed=1))) not in numbers


def test_torch_does_not_look(file: Path) -> None:
    """What the check is for. Should torch look one day, it can go."""
    position = contents(file)[0].start
    turn(file, position + 3)
    torch.load(file, weights_only=True)


def contents(file: Path) -> list[range]:
    """Where the contents of a file's records are."""
    with zipfile.ZipFile(file) as archive:
        found = []
        for record in archive.infolist():
            with archive.open(record) as content:
                found.append(range(content._orig_compress_start, content._orig_compress_start + record.file_size))  # type: ignore[attr-defined]
    return sorted(found, key=len, reverse=True)


def turn(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << (position % 8)
    file.write_bytes(data)


def trouble_in(file: Path, part: int = 0, parts: int = 1) -> str:
    try:
        check_file(str(file), part, parts)
    except CheckpointError as error:
        return str(error)
    return ""


def test_each_turned_bit_is_found_by_one_of_those_who_share(file: Path) -> None:
    """In any record; between them is padding that nobody reads."""
    whole = file.read_bytes()
    rng = random.Random(0)
    for where in contents(file):
        for position in rng.sample(where, min(4, len(where))):
            turn(file, position)
            found = 0
            for part in range(3):
                found += "it is damaged, it has changed since it was written: Bad CRC-32" in trouble_in(file, part, 3)
            assert found == 1, position
            file.write_bytes(whole)


def test_any_turned_bit_is_harmless_or_found(file: Path) -> None:
    """Anywhere in the file: an error, ours or torch's, or everything is what it was."""
    whole, content = file.read_bytes(), torch.load(file, weights_only=True)
    for position in random.Random(1).sample(range(len(whole)), 300):
        turn(file, position)
        trouble = trouble_in(file)
        assert not trouble or "it is damaged" in trouble or "it is cut off" in trouble
        if not trouble:
            with contextlib.suppress(RuntimeError, pickle.UnpicklingError):
                loaded = torch.load(file, weights_only=True)
                assert_same(loaded, content, f"bit of {position}", tolerance=0.0)
        file.write_bytes(whole)


@pytest.mark.parametrize("rest", [0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_off(file: Path, rest: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * rest)])
    with pytest.raises(CheckpointError, match="it is cut off: it begins as a checkpoint does"):
        check_file(str(file))


def test_others_judge_files_of_other_kinds(tmp_path: Path) -> None:
    """An old format of torch's, text, a folder, nothing."""
    old, text = tmp_path / "old.ckpt", tmp_path / "text.ckpt"
    torch.save({"a": torch.ones(3)}, old, _use_new_zipfile_serialization=False)
    text.write_text("no checkpoint")
    assert [check_file(str(path)) for path in (old, text, tmp_path, tmp_path / "none")] == [0, 0, 0, 0]


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    """torch.serialization.set_crc32_options(False) writes such; their sizes are compared all the same."""
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this torch always writes them")
    torch.serialization.set_crc32_options(False)
    try:
        file = write(tmp_path / "file.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    check_file(str(file))


def test_shares_are_even_and_cover_all() -> None:
    records: list[Any] = [SimpleNamespace(filename=str(n), file_size=n) for n in (0, 1, 2, 3, 5, 8, 13, 21, 34)]
    for parts in (1, 2, 3, 20):
        shares = [share(records, part, parts) for part in range(parts)]
        assert sorted(r.file_size for s in shares for r in s) == [r.file_size for r in records]
        loads = [sum(r.file_size for r in s) for s in shares]
        assert max(loads) <= max(34, sum(loads) // parts + 8)


def test_content(tmp_path: Path) -> None:
    """A checkpoint of Lightning's, and what is none."""
    step = {"pytorch-lightning_version": "2.6.0", "global_step": 1, "state_dict": {"a": torch.ones(2)}}
    assert check_content(step) == check_content(dict(step)) != check_content({**step, "global_step": 2})
    for other, words in (({"a": torch.ones(2)}, r"a dictionary with the keys \['a'\]"), (torch.ones(2), "Tensor")):
        with pytest.raises(CheckpointError, match=f"it is no checkpoint of Lightning's, it holds {words}"):
            check_content(other)
