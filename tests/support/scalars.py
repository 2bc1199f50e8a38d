"""Reads what a TensorBoardLogger has written, without TensorBoard."""

from __future__ import annotations

import struct
from collections import defaultdict
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By name, (step, value) in the order in which they were written."""
    scalars: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):  # length, its checksum, record, its checksum
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            for value in event.summary.value:
                scalars[value.tag].append((event.step, value.simple_value))
    return dict(scalars)
