"""Room in a file for what is put together piece by piece."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor

from lightning_embrace.sizes import human_bytes


@dataclass(frozen=True)
class Room:
    """Where the bytes of a tensor belong.

    Attributes:
        start: Of its first byte.
        checksums: Where their CRC-32 stands, little-endian.
    """

    start: int
    checksums: tuple[int, ...] = ()


def bytes_of(tensor: Tensor) -> memoryview:
    """A dense tensor's bytes in the order of its elements, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def check_disk(descriptor: int, nbytes: int, what: str = "") -> None:
    """Refuses what would not fit on the disk, before it is written.

    Args:
        descriptor: Of a file on that disk.
        nbytes: What is to be written.
        what: Who writes it.

    Raises:
        OSError: It would not fit.
    """
    disk = os.fstatvfs(descriptor)
    free = disk.f_bavail * disk.f_frsize
    if nbytes > free:
        raise OSError(
            errno.ENOSPC,
            f"{what}{': ' if what else ''}{os.strerror(errno.ENOSPC)}: {human_bytes(nbytes)} are to be written, and"
            f" {human_bytes(free)} are free",
        )


def fill(file: BinaryIO, room: Room, pieces: Iterable[Tensor]) -> None:
    """Writes a tensor that comes in pieces, and its checksums.

    Args:
        file: Open for writing.
        room: Where it belongs.
        pieces: Consecutive pieces of it. All are taken, come what may: other ranks send them.

    Raises:
        OSError: It could not be written.
    """
    checksum, rest = 0, iter(pieces)
    try:
        file.seek(room.start)
        for piece in rest:
            data = bytes_of(piece)
            file.write(data)
            checksum = zlib.crc32(data, checksum)
        for position in room.checksums:
            file.seek(position)
            file.write(struct.pack("<I", checksum))
    except Exception:
        for _ in rest:
            pass
        raise
