"""What torch.distributed.checkpoint stores: tensors in blocks of rows, read without pickles that run code."""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from lightning_embrace.checkpoint.agreement import CheckpointError
from lightning_embrace.checkpoint.hole import Hole

#: torch.distributed.checkpoint's own name; rank 0 writes it when every rank has written its part
METADATA = ".metadata"
#: a reader holds one stored block beside what it reads into, so no block is much larger than this
BLOCK_BYTES = 64 << 20
#: but a large shard has no more blocks than this: every rank plans with all of them
_MOST_BLOCKS = 256

_DCP = "torch.distributed.checkpoint"
_KNOWN = {
    (f"{_DCP}.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
_PATHS = ("Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")


class Writing:
    """One rank's part in writing a folder: plan, write, finish. Between them the ranks tell each other what they have.

    torch.distributed.checkpoint's own ``save`` does the same in one go; it waits for the slowest disk inside of
    collectives, which end by the group's timeout.

    Args:
        folder: Where to; the same on every rank.
        state: Nested dictionaries of DTensors, of which each rank writes its shard, and of what only this rank has. The
            rows of holes are asked for when they are written.
        rank: This rank.
    """

    def __init__(self, folder: Path, state: dict[str, Any], rank: int) -> None:
        self._state = state
        self._rank = rank
        self._writer = FileSystemWriter(folder)
        self._planner = _RowBlocks()
        self._metadata: Metadata | None = None

    def plan(self) -> SavePlan:
        """What this rank has to write."""
        first = self._rank == 0
        self._planner.set_up_planner(self._state, self._writer.storage_meta(), first)
        self._writer.set_up_storage_writer(first)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def write(self, plans: list[SavePlan]) -> list[WriteResult]:
        """Writes it, down to the disk.

        Args:
            plans: Every rank's.

        Returns:
            What has become of each part of it.
        """
        plans, self._metadata = self._planner.create_global_plan(plans)
        mine = self._writer.prepare_global_plan(plans)[self._rank]
        plan = self._planner.finish_plan(mine)
        results: list[WriteResult] = []
        # torch holds what it writes to a file until that is closed
        holes = any(isinstance(self._planner.state_dict.get(item.index.fqn), Hole) for item in plan.items)
        for number, items in enumerate(_files(plan.items, BLOCK_BYTES if holes else None)):
            prefix = plan.storage_data.prefix + (f"{number}_" if number else "")
            part = dataclasses.replace(plan, items=items, storage_data=type(plan.storage_data)(prefix))
            results += self._writer.write_data(part, self._planner).wait()
        return results

    def finish(self, results: list[list[WriteResult]]) -> None:
        """Writes what describes the whole; call it on one rank, with every rank's results."""
        assert self._metadata is not None
        self._writer.finish(self._metadata, results)


def read_metadata(folder: Path) -> Metadata:
    """Reads what a folder says about its tensors: a pickle, of which nothing but that is taken.

    Raises:
        CheckpointError: It cannot be read, or has something else in it.
    """
    with (folder / METADATA).open("rb") as file:
        try:
            metadata = _MetadataUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{METADATA} is damaged: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{METADATA} is damaged: it holds a {type(metadata).__name__}")
    return metadata


def missing_parts(metadata: Metadata) -> Iterator[str]:
    """Tensors of which the stored blocks do not make up the whole."""
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            there = sum(chunk.sizes.numel() for chunk in stored.chunks)
            if there != stored.size.numel():
                yield key


def read_into(folder: Path, metadata: Metadata, targets: dict[str, Any], weights_only: bool) -> None:
    """Reads stored values. Communicates with nobody.

    Args:
        folder: Where they are.
        metadata: What :func:`read_metadata` returned.
        targets: By stored key a tensor that is filled, whole or a DTensor of which this rank's part is read; what is
            not a tensor is put in the place of None.
        weights_only: As in ``torch.load``, for what is not a tensor.
    """
    planner = _IntoTargets(weights_only)
    planner.set_up_planner(targets, metadata, True)
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


class _RowBlocks(DefaultSavePlanner):
    """Stores shards and holes in blocks of rows, so that nobody who reads or writes them holds them whole."""

    def create_local_plan(self) -> SavePlan:
        """Cuts what the default plan writes at once."""
        plan = super().create_local_plan()
        items = [self._as_shard(item) for item in plan.items]
        self.plan = dataclasses.replace(plan, items=[part for item in items for part in _blocks(item)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The rows of one block; the columns of a shard are those that the rank has."""
        hole = self.state_dict.get(write_item.index.fqn)
        if isinstance(hole, Hole):
            assert hole.read is not None and write_item.tensor_data is not None and write_item.index.offset is not None
            return hole.read((*write_item.index.offset, 0)[0], (*write_item.tensor_data.chunk.sizes, 1)[0])
        data = super().resolve_data(write_item)
        if write_item.type == WriteItemType.SHARD and isinstance(data, Tensor):
            assert write_item.tensor_data is not None and write_item.index.offset is not None
            rows = write_item.tensor_data.chunk.sizes[0]
            return data if data.shape[0] == rows else data.narrow(0, write_item.index.offset[0], rows)
        return data

    def _as_shard(self, item: WriteItem) -> WriteItem:
        """What of a hole is to be written; a tensor of one number has no rows."""
        hole = self.state_dict.get(item.index.fqn)
        return dataclasses.replace(item, type=WriteItemType.SHARD) if isinstance(hole, Hole) and hole.ndim else item


def _files(items: list[WriteItem], limit: int | None) -> Iterator[list[WriteItem]]:
    """Which parts are in a file together: all of them, or so many bytes at most if each has no more."""
    together: list[WriteItem] = []
    nbytes = 0
    for item in items:
        data = item.tensor_data
        size = 0 if data is None or data.chunk is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
        if together and limit is not None and nbytes + size > limit:
            yield together
            together, nbytes = [], 0
        together.append(item)
        nbytes += size
    if together:  # no empty file
        yield together


def _blocks(item: WriteItem) -> list[WriteItem]:
    data = item.tensor_data
    if item.type != WriteItemType.SHARD or data is None or data.chunk.sizes[:1] != data.size[:1]:
        return [item]  # only what is split by columns
    offsets, sizes = data.chunk.offsets, data.chunk.sizes
    row_bytes = math.prod(sizes[1:]) * data.properties.dtype.itemsize
    step = max(1, -(-sizes[0] // _MOST_BLOCKS), BLOCK_BYTES // max(1, row_bytes))
    return [
        _part(item, data, offsets[0] + start, min(step, sizes[0] - start)) for start in range(0, max(1, sizes[0]), step)
    ]


def _part(item: WriteItem, data: TensorWriteData, start: int, rows: int) -> WriteItem:
    offsets = torch.Size((start, *data.chunk.offsets[1:]))
    chunk = ChunkStorageMetadata(offsets, torch.Size((rows, *data.chunk.sizes[1:])))
    tensor_data = TensorWriteData(chunk, data.properties, data.size)
    return WriteItem(MetadataIndex(item.index.fqn, offsets), item.type, tensor_data=tensor_data)


class _IntoTargets(DefaultLoadPlanner):
    """Reads by stored keys, and unpickles no more than is allowed."""

    def __init__(self, weights_only: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """A value that is not a tensor."""
        fqn = read_item.dest_index.fqn
        self.state_dict[fqn] = torch.load(value, map_location="cpu", weights_only=self._weights_only)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Nothing but what describes tensors."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_path = module.split(".")[0] == "pathlib" and name in _PATHS
        if is_dtype or is_path or (module, name) in _KNOWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which describes no tensor")
