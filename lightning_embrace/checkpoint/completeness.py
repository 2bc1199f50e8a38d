"""Whether a sharded checkpoint is whole: the list of its files, which is written last, and what is compared with it."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zipfile import is_zipfile

from lightning_embrace.checkpoint.agreement import CheckpointError
from lightning_embrace.checkpoint.stored import METADATA, missing_parts, read_metadata

#: Lightning's name for what is neither a weight nor an optimizer state
META = "meta.pt"
#: the list of a folder's files; a folder of ours without it is not finished
MARK = "embrace.json"
_PIECE_BYTES = 1 << 20


class Sum(NamedTuple):
    """What is remembered of a file."""

    bytes: int
    crc32: int


def sum_of(path: Path) -> Sum:
    """Reads a file once."""
    size = crc = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return Sum(size, crc)


def write_mark(folder: Path, files: dict[str, Sum], world_size: int) -> None:
    """Says that a folder is complete.

    Args:
        folder: The folder.
        files: All others in it.
        world_size: How many ranks have written it.
    """
    content = {"version": 1, "world_size": world_size, "files": {name: s._asdict() for name, s in files.items()}}
    with (folder / MARK).open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def check_whole(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Compares a folder with its list.

    A folder that Lightning has written has no list. Then the sizes are compared with what its ``.metadata`` says.

    Args:
        folder: The folder.
        part: Which of the files are read and compared with their checksums here, from 0.
        parts: Among how many the files are shared out; 0: none is read, only sizes are compared.

    Raises:
        CheckpointError: Something is missing, cut off or changed; the message says what.
    """
    faults = list(_faults(folder, part, parts))
    if faults:
        raise CheckpointError(f"it is not whole ({'; '.join(faults)})")


def last_whole(folder: Path, but: Path | None = None) -> Path | None:
    """The newest checkpoint in a folder, a file or a folder, that has all that it should; contents are not read."""
    candidates = [p for p in folder.iterdir() if p != but and not p.name.startswith(".") and _looks_whole(p)]
    return max(candidates, key=lambda p: p.stat().st_mtime, default=None)


def _looks_whole(path: Path) -> bool:
    if path.is_dir():
        return (path / MARK).is_file() and not any(_listed(path, 0, 0))
    return path.suffix == ".ckpt" and is_zipfile(path)


def _faults(folder: Path, part: int, parts: int) -> Iterator[str]:
    if (folder / MARK).is_file():
        yield from _listed(folder, part, parts)
        return
    missing = [name for name in (METADATA, META) if not (folder / name).is_file()]
    if missing:
        yield f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: it was not finished"
        return
    metadata = read_metadata(folder)
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        yield from _sized(folder / name, end, at_least=True)
    yield from (f"parts of {key} are missing" for key in missing_parts(metadata))


def _listed(folder: Path, part: int, parts: int) -> Iterator[str]:
    """What differs from the list."""
    try:
        content = json.loads((folder / MARK).read_text())
        files = {str(name): Sum(int(s["bytes"]), int(s["crc32"])) for name, s in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"{MARK} is damaged: {error}"
        return
    for position, (name, known) in enumerate(files.items()):
        fault = next(_sized(folder / name, known.bytes), None)
        if fault is not None:
            yield fault
        elif parts and position % parts == part and sum_of(folder / name) != known:
            yield f"{name} was changed after it was written: its checksum differs"


def _sized(path: Path, size: int, at_least: bool = False) -> Iterator[str]:
    if not path.is_file():
        yield f"{path.name} is missing"
        return
    there = path.stat().st_size
    if there < size or (there > size and not at_least):
        yield f"{path.name} has {there} bytes of {size}"
