"""Whether a checkpoint file is what was written: nobody else looks.

torch.save writes a checksum for each part of its file, and torch.load is compiled without the check: a bit that a disk
or a copy has turned becomes a weight.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from lightning_embrace.checkpoint.agreement import CheckpointError

_MAGIC = b"PK\x03\x04"
_PICKLE = b"\x80"
_PIECE_BYTES = 4 << 20


def check_file(path: str, part: int = 0, parts: int = 1) -> int:
    """Compares a file of torch.save's with its checksums; whoever shares it shares the work.

    Args:
        path: The file. One of another kind, or none, is for others to judge.
        part: Which of the parts is looked at here, from 0.
        parts: Into how many parts the work is divided. Each looks at the file's table of contents.

    Returns:
        A number that differs where the content does. 0 for a file of another kind.

    Raises:
        CheckpointError: The file is cut off, or has changed since it was written.
    """
    if not Path(path).is_file():
        return 0
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return 0
    if not zipfile.is_zipfile(path):
        raise CheckpointError("it is cut off: it begins as a checkpoint does, and its end is missing")
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            # without any: `torch.serialization.set_crc32_options(False)`
            for record in share(records, part, parts) if any(r.CRC for r in records) else ():
                with archive.open(record) as content:
                    while content.read(_PIECE_BYTES):
                        pass
    except OSError:
        raise
    except Exception as error:  # what a turned bit can make of a zip file is raised as many things
        raise CheckpointError(f"it is damaged, it has changed since it was written: {error}") from error
    return crc32(repr([(r.filename, r.file_size, r.CRC) for r in records]).encode())


def check_kind(path: str) -> None:
    """Makes sure that torch can have written a file, before it says so in words about something else.

    Raises:
        CheckpointError: It begins otherwise than torch's files, old or new.
    """
    if Path(path).is_file():
        with open(path, "rb") as file:
            begins = file.read(len(_MAGIC))
        if not begins.startswith((_MAGIC, _PICKLE)):
            raise CheckpointError(f"it is no checkpoint: it begins with {begins!r}, which torch.save does not write")


def share(records: Sequence[zipfile.ZipInfo], part: int, parts: int) -> list[zipfile.ZipInfo]:
    """Divides records so that everybody has about as many bytes to read.

    Args:
        records: All of them.
        part: Whose share.
        parts: Into how many.

    Returns:
        One share.
    """
    loads = [0] * parts
    mine = []
    for record in sorted(records, key=lambda r: (-r.file_size, r.filename)):
        lightest = loads.index(min(loads))
        loads[lightest] += record.file_size
        if lightest == part:
            mine.append(record)
    return mine


def check_content(content: Any) -> int:
    """Makes sure that what was read is a checkpoint of Lightning's.

    Args:
        content: What was read.

    Returns:
        A number that differs where epoch, step or the names of the weights do.

    Raises:
        CheckpointError: It is something else.
    """
    if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
        what = (
            f"a dictionary with the keys {list(content)[:5]}" if isinstance(content, dict) else type(content).__name__
        )
        raise CheckpointError(
            f"it is no checkpoint of Lightning's, it holds {what}. Weights alone are loaded with"
            " `model.load_state_dict(torch.load(path))` before training."
        )
    names = sorted(content.get("state_dict") or ())
    return crc32(repr((content.get("epoch"), content.get("global_step"), names)).encode())
