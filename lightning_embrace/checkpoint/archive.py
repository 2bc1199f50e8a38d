"""torch's checkpoint files, with room for tensors that are put together afterwards.

``torch.save`` writes a zip archive: a pickle, and a record for each storage. Holes get records without content, which
are holes in the file too until they are filled; everything else is torch's own code, and so is the layout.
"""

from __future__ import annotations

import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch import serialization
from torch.storage import TypedStorage

from lightning_embrace.checkpoint.filling import Room
from lightning_embrace.checkpoint.hole import Hole

_LOCAL_HEADER, _CENTRAL_HEADER = 30, 46
_CHECKSUM_IN_LOCAL, _CHECKSUM_IN_CENTRAL = 14, 16
_DESCRIPTOR = b"PK\x07\x08"


def can_leave_room() -> bool:
    """Whether the installed torch writes records without content (2.6 and later)."""
    return hasattr(torch._C.PyTorchFileWriter, "write_record_metadata")


def write_archive(file: BinaryIO, content: Any) -> list[tuple[Hole, Room]]:
    """What ``torch.save`` does, except for the values of holes.

    Args:
        file: Empty, open for writing and reading.
        content: What is to be saved.

    Returns:
        The holes in it, in the order of the file, with the room that is left for each.

    Raises:
        OSError: It could not be written.
    """
    sink, claims = _Sink(file), dict[int, tuple[TypedStorage, Hole]]()
    storages: dict[int, TypedStorage] = {}

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, Hole) and obj.ids_U is not None:  # as torch pickles a sparse tensor
                data = obj.ids_U.unsqueeze(0), _Values(obj), obj.shape, True
                return torch._utils._rebuild_sparse_tensor, (torch.sparse_coo, data)
            if not isinstance(obj, (Hole, _Values)):
                return NotImplemented
            hole = obj if isinstance(obj, Hole) else obj.hole
            storage = storages.setdefault(hole.number, _claim(hole))
            claims[id(storage._untyped_storage)] = storage, hole
            # as torch pickles a dense tensor that has its storage for itself
            layout = hole.content, hole.content_stride
            return torch._utils._rebuild_tensor_v2, (storage, 0, *layout, False, OrderedDict())

    with serialization._open_zipfile_writer(sink) as writer:  # type: ignore[arg-type]
        records = _Records(writer, sink, claims)
        modules = SimpleNamespace(Pickler=Pickler)
        serialization._save(content, records, modules, serialization.DEFAULT_PROTOCOL, False)
    sink.check()
    claims.clear()
    storages.clear()  # the class above lives until garbage is collected
    return _with_rooms(file, records.left) if records.left else []


def _claim(hole: Hole) -> TypedStorage:
    """A storage that says it has the hole's size, and has one byte."""
    storage = TypedStorage(wrap_storage=torch.UntypedStorage(1), dtype=hole.dtype, _internal=True)
    count = math.prod(hole.content)
    storage._size = lambda: count  # type: ignore[method-assign]
    return storage


@dataclass(frozen=True)
class _Values:
    """The values of a sparse tensor."""

    hole: Hole


class _Records:
    """torch's writer of records, which leaves those of holes without content.

    Args:
        writer: torch's.
        sink: Where it writes.
        claims: By the id of a storage, the hole that it stands for.
    """

    def __init__(self, writer: Any, sink: _Sink, claims: dict[int, tuple[TypedStorage, Hole]]) -> None:
        self._writer, self._sink, self._claims = writer, sink, claims
        #: by name of the record
        self.left: dict[str, Hole] = {}

    def write_record(self, name: str, data: Any, size: int) -> None:
        """Writes a record, or its header and the room that it needs."""
        _, hole = self._claims.get(id(data), (None, None))
        if hole is None:
            self._writer.write_record(name, data, size)
        elif hole.content_bytes == 0:
            self._writer.write_record(name, b"", 0)
        else:
            self._writer.write_record_metadata(name, hole.content_bytes)
            self.left[name] = hole
        self._sink.check()


class _Sink:
    """A file for torch's writer. No error passes through that: the first one is kept, and ends the writing."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: Exception | None = None

    def write(self, data: Any) -> int:
        """Writes, if all has gone well."""
        if self._error is None:
            try:
                self._file.write(data)
            except Exception as error:
                self._error = error
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> None:
        """Leaves room, if all has gone well."""
        if self._error is None:
            try:
                self._file.seek(offset, whence)
            except Exception as error:
                self._error = error

    def flush(self) -> None:
        """The file is flushed by whoever opened it."""

    def check(self) -> None:
        """Raises what was kept."""
        if self._error is not None:
            raise self._error


def _with_rooms(file: BinaryIO, left: dict[str, Hole]) -> list[tuple[Hole, Room]]:
    """Where the contents of records and their checksums belong, read from the archive's directory."""
    rooms = {}
    with zipfile.ZipFile(file) as archive:
        entry = archive.start_dir
        for info in archive.filelist:
            rooms[info.filename.partition("/")[2]] = _room(file, info, entry)
            entry += _CENTRAL_HEADER + sum(_read(file, entry + 28, "<3H"))
    return [(hole, rooms[name]) for name, hole in left.items()]


def _room(file: BinaryIO, info: zipfile.ZipInfo, entry: int) -> Room:
    """Of one record, whose entry in the directory begins at ``entry``."""
    header = info.header_offset
    start = header + _LOCAL_HEADER + sum(_read(file, header + 26, "<2H"))
    in_record = header + _CHECKSUM_IN_LOCAL
    if info.flag_bits & 8:  # sizes and checksum stand behind the content
        in_record = start + info.file_size
        file.seek(in_record)
        if file.read(4) == _DESCRIPTOR:
            in_record += 4
    return Room(start, (in_record, entry + _CHECKSUM_IN_CENTRAL))


def _read(file: BinaryIO, position: int, format_: str) -> tuple[int, ...]:
    file.seek(position)
    return struct.unpack(format_, file.read(struct.calcsize(format_)))
