"""safetensors files: a header and the bytes of each tensor, so that they can be written one after the other."""

from __future__ import annotations

import json
import struct
from collections.abc import Hashable, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_embrace.checkpoint.filling import Room, bytes_of
from lightning_embrace.checkpoint.hole import Hole

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_ALIGNMENT = 8


def write_weights(file: BinaryIO, state: Mapping[str, Any]) -> list[tuple[Hole, Room]]:
    """Writes a state dict without the values of holes. Of names for one tensor, it has the first in the alphabet.

    The library does the same (``safetensors.torch.save_model``), and ``load_model`` knows of it.

    Args:
        file: Empty, open for writing.
        state: Tensors by name.

    Returns:
        The holes in it, with the room that is left for each.

    Raises:
        ValueError: It has something that the format cannot hold.
        OSError: It could not be written.
    """
    _check(state)
    kept, twins = _apart(state)
    # large elements first, so that each tensor begins at a multiple of its element's size
    names = sorted(kept, key=lambda name: (-kept[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **twins}}
    end = 0
    for name in names:
        begin, end = end, end + kept[name].numel() * kept[name].element_size()
        shape = list(kept[name].shape)
        header[name] = {"dtype": _NAMES[kept[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(struct.pack("<Q", len(text)) + text)
    rooms = []
    for name in names:
        start = 8 + len(text) + header[name]["data_offsets"][0]
        if isinstance(kept[name], Hole):
            rooms.append((kept[name], Room(start)))
        else:
            file.seek(start)
            file.write(bytes_of(kept[name]))
    return rooms


def _check(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if not isinstance(value, Tensor):
            what = f"a {type(value).__name__}"
        elif value.layout != torch.strided or value.is_quantized:
            what = f"a tensor of layout {value.layout}"
        elif value.dtype not in _NAMES:
            what = f"a tensor of dtype {value.dtype}"
        else:
            continue
        raise ValueError(
            f"The state dict has {what} as {name!r}, which a safetensors file cannot hold. Save a checkpoint"
            " (`trainer.save_checkpoint(path, weights_only=True)`), or keep it out of the state dict."
        )


def _apart(state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, str]]:
    """What is there once, and the other names with those under which it is there."""
    first: dict[Hashable, str] = {}
    twins: dict[str, str] = {}
    for name in sorted(state):
        other = first.setdefault(_identity(name, state[name]), name)
        if other != name:
            twins[name] = other
    return {name: state[name] for name in first.values()}, twins


def _identity(name: str, tensor: Tensor) -> Hashable:
    if isinstance(tensor, Hole):
        return tensor.number
    if tensor.numel() == 0:
        return name
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
