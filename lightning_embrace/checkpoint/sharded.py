"""Sharded checkpoints: folders of torch.distributed.checkpoint to which every rank writes its part."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from lightning_embrace.checkpoint.agreement import CheckpointError, Gather, write_together
from lightning_embrace.checkpoint.completeness import META, Sum, check_whole, last_whole, sum_of, write_mark
from lightning_embrace.checkpoint.layout import joined, own_part, split
from lightning_embrace.checkpoint.replacing import put_in_place, remove, sync_folder, unfinished
from lightning_embrace.checkpoint.stored import METADATA, Writing, read_into, read_metadata

T = TypeVar("T")
#: where a stored tensor is read into: a DTensor, of which this rank's columns are read, or None, which is the whole; a
#: tensor on the meta device is not read, and may be later
Place = Callable[[tuple[Any, ...], tuple[int, ...], torch.dtype], Tensor | None]
#: by path in the stored part, the size of a tensor; None for what is not a tensor
Sizes = dict[tuple[Any, ...], tuple[int, ...] | None]
_UNREAD = "embrace_unread"


class Ranks(NamedTuple):
    """How the ranks that write a checkpoint talk to each other.

    Attributes:
        rank: This one.
        world_size: How many there are.
        words: Tells a few words to all, however long they take to come.
        objects: Gives every rank's object to all; none is late.
    """

    rank: int
    world_size: int
    words: Gather
    objects: Callable[[Any], list[Any]]


def write_folder(ranks: Ranks, path: Path, checkpoint: Mapping[str, Any], last: str | None) -> None:
    """Writes a checkpoint. The old one at this path stays until the new one is complete. Collective.

    Args:
        ranks: This rank and the others.
        path: The folder that it will be, which all ranks see.
        checkpoint: Lightning's, with DTensors for shards and optimizer states that have names.
        last: The last whole checkpoint, for errors.

    Raises:
        CheckpointError: A rank could not write it. There is nothing new at the path then.
    """
    together = partial(_together, ranks, path, last)
    folder = unfinished(path)
    parts = together(lambda: split(checkpoint))
    first = ranks.rank == 0
    together(partial(_clear, folder) if first else _nothing)
    try:
        writing = Writing(folder, own_part(parts.stored, ranks.rank), ranks.rank)
        plans = ranks.objects(together(writing.plan))
        written = together(lambda: (writing.write(plans), _sums(folder, f"__{ranks.rank}_*")))
        results, sums = zip(*ranks.objects(written))

        def finish() -> None:
            writing.finish(list(results))
            _save(parts.meta, folder / META)
            rest = {name: sum_of(folder / name) for name in (METADATA, META)}
            write_mark(folder, {name: s for files in (*sums, rest) for name, s in files.items()}, ranks.world_size)
            check_shared(folder, ranks.world_size)
            sync_folder(folder)
            put_in_place(folder, path)

        together(finish if first else _nothing)
    except Exception:
        if first:
            with suppress(OSError):
                remove(folder)
        raise


def read_folder(path: Path, place: Callable[[Sizes], Place], weights_only: bool | None) -> dict[str, Any]:
    """Reads a checkpoint that is known to be whole. Communicates with nobody.

    Args:
        path: The folder, ours, FSDPStrategy's or ModelParallelStrategy's.
        place: Told the sizes, says where the tensors go.
        weights_only: As in ``torch.load``; whatever it is, tensors are read without pickles.

    Returns:
        The checkpoint as a file has it. Tensors on the meta device stand for those that were not read.
    """
    meta = torch.load(path / META, map_location="cpu", weights_only=weights_only)
    metadata = read_metadata(path)
    keys = metadata.planner_data or {key: (key,) for key in metadata.state_dict_metadata}
    contents = metadata.state_dict_metadata.items()
    tensors = {key: stored for key, stored in contents if isinstance(stored, TensorStorageMetadata)}
    sizes = {keys[key]: tuple(tensors[key].size) if key in tensors else None for key, _ in contents}
    where = place(sizes)
    values: dict[str, Any] = dict.fromkeys(metadata.state_dict_metadata)
    for key, stored in tensors.items():
        size, dtype = tuple(stored.size), stored.properties.dtype
        target = where(keys[key], size, dtype)
        values[key] = target = torch.empty(size, dtype=dtype) if target is None else target
        if target.is_meta:
            setattr(target, _UNREAD, _Unread(path, metadata, key))
    now = {key: value for key, value in values.items() if not (isinstance(value, Tensor) and value.is_meta)}
    read_into(path, metadata, now, weights_only is not False)
    return joined(unflatten_state_dict({**values, **now}, keys), meta)


def read_rest(values: Any, place: Place) -> Any:
    """Reads what :func:`read_folder` has left unread.

    Args:
        values: Nested dictionaries and lists.
        place: Where the tensors go; it is given the path within ``values``.

    Returns:
        The same with plain tensors: the whole, or this rank's columns.
    """
    found: list[tuple[_Unread, Tensor]] = []
    read = _replaced(values, (), place, found)
    for folder in {unread.folder for unread, _ in found}:
        mine = [(unread, target) for unread, target in found if unread.folder == folder]
        read_into(folder, mine[0][0].metadata, {unread.key: target for unread, target in mine}, weights_only=True)
    return read


def check_folder(path: Path, part: int = 0, parts: int = 1) -> None:
    """Makes sure that a folder is a whole checkpoint. Communicates with nobody.

    Args:
        path: The folder.
        part: Which of the files are read and compared with their checksums here, from 0.
        parts: Among how many processes the files are shared out.

    Raises:
        CheckpointError: It is not; the message names what is missing, and the last whole checkpoint beside it.
    """
    try:
        check_whole(path, part, parts)
    except CheckpointError as error:
        other = last_whole(path.parent, path)
        raise CheckpointError(
            f"{error}. {f'The last whole checkpoint in its folder is {other}.' if other else 'There is no other.'}"
        ) from error


def check_shared(folder: Path, world_size: int) -> None:
    """Makes sure that rank 0 sees what all ranks have written.

    Raises:
        CheckpointError: It does not.
    """
    try:
        check_whole(folder, parts=0)  # the contents have just been read
    except CheckpointError as error:
        raise CheckpointError(
            f"rank 0 does not find what {world_size} ranks have written: {error}. A sharded checkpoint is written to"
            " one folder, on a file system that all machines share. Or write it as a file: state_dict_type='full'."
        ) from error


class _Unread(NamedTuple):
    folder: Path
    metadata: Metadata
    key: str


def _replaced(values: Any, path: tuple[Any, ...], place: Place, found: list[tuple[_Unread, Tensor]]) -> Any:
    if isinstance(values, Mapping):
        return {key: _replaced(value, (*path, key), place, found) for key, value in values.items()}
    if isinstance(values, list):
        return [_replaced(value, (*path, number), place, found) for number, value in enumerate(values)]
    unread = getattr(values, _UNREAD, None)
    if not isinstance(unread, _Unread):
        return values
    target = place(path, tuple(values.shape), values.dtype)
    target = torch.empty(values.shape, dtype=values.dtype) if target is None else target
    found.append((unread, target))
    return target.to_local() if isinstance(target, DTensor) else target


def _together(ranks: Ranks, path: Path, last: str | None, doing: Callable[[], T]) -> T:
    """Does this rank's part; all ranks raise where one fails."""
    outcome: list[T] = []
    write_together(ranks.words, str(path), lambda: outcome.append(doing()), last)
    return outcome[0]


def _clear(folder: Path) -> None:
    """Removes what a process that died has left unfinished."""
    remove(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)


def _sums(folder: Path, pattern: str) -> dict[str, Sum]:
    return {file.name: sum_of(file) for file in sorted(folder.glob(pattern))}


def _save(content: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _nothing() -> None:
    """The part of a rank that has none."""
