"""Pretrained word vectors, read into a table or into this rank's columns of one, never as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_embrace.checkpoint.vector_files import Entry, Format, VectorFile
from lightning_embrace.tables.column_tensor import ColumnTensor
from lightning_embrace.tables.modules import handle_of

#: vectors that wait in memory until they are written together
_BATCH = 1024
#: different rows, and a vector for each, [R, d]
Block = tuple[list[int], Any]


@dataclass(frozen=True)
class LoadedVectors:
    """What a file of vectors had.

    Attributes:
        found: How many rows were filled.
        missing: Words of the vocabulary that the file does not have; their rows are what they were.
    """

    found: int
    missing: tuple[str, ...]


def load_vectors(
    embedding: nn.Embedding | nn.EmbeddingBag,
    path: str | Path,
    vocabulary: Mapping[str, int] | Sequence[str] | None = None,
    *,
    words: Sequence[str] | None = None,
    format: Format = "auto",
) -> LoadedVectors:
    """Fills rows of an embedding table with pretrained vectors.

    The file is read as a stream, on every rank: each keeps the columns that it has. Call it on all ranks alike, where
    the table is whole (before ``fit``), in ``configure_model`` after the table has been made, or between training steps
    (in ``on_fit_start``; there it would also replace what ``ckpt_path`` has loaded). Of a word that the file has twice
    the first vector counts. The padding row stays what it is.

    Args:
        embedding: The module.
        path: The texts of word2vec and GloVe (also with ``.gz`` behind the name), word2vec's binary files, or ``.npy``.
        vocabulary: The row of each word; or the words in the order of rows. May be left out for ``.npy``, whose row i
            then is row i of the table.
        words: For ``.npy``: the word of each of its rows.
        format: What the file is; ``"auto"``: by what it begins with.

    Returns:
        How many rows were filled, and which words the file does not have.

    Raises:
        ValueError: The format is unknown, the vectors have another dimension or are no floating-point numbers, a row is
            out of the table, a line is broken, or the file ends too early. What came before it has been written.
        RuntimeError: Inside a step.
    """
    columns = _columns_of(embedding)
    file = VectorFile(path, columns.width, format)
    rows = _rows_of(vocabulary, columns.table_Vd.shape[0])
    if file.format == "npy":
        blocks = _of_array(file, columns, rows, words)
    elif rows is None:
        raise ValueError(f"{file.path} has words: load_vectors(..., vocabulary) must say which row each of them has.")
    elif words is not None:
        raise ValueError(f"{file.path} has words of its own; `words` is for .npy files.")
    else:
        blocks = _of_entries(file.entries(columns.part, rows.__contains__), rows)
    taken = torch.zeros(columns.table_Vd.shape[0], dtype=torch.bool)
    if embedding.padding_idx is not None:
        taken[embedding.padding_idx] = True
    with columns.changing:
        found = sum(_write(columns.table_Vd, taken, *block) for block in blocks)
    missing = tuple(word for word, row in (rows or {}).items() if not taken[row])
    return LoadedVectors(found, missing)


class _Columns(NamedTuple):
    """The part of a table that is here.

    Attributes:
        table_Vd: Its numbers, to be written to.
        part: Which columns of the whole these are.
        width: D, the columns of the whole.
        changing: Around the writing.
    """

    table_Vd: Tensor
    part: slice
    width: int
    changing: AbstractContextManager[None]


def _columns_of(embedding: nn.Module) -> _Columns:
    if not isinstance(embedding, (nn.Embedding, nn.EmbeddingBag)):
        raise ValueError(
            f"load_vectors needs an nn.Embedding or nn.EmbeddingBag, not a {type(embedding).__name__}. Give it the"
            " module that looks the words up."
        )
    weight = embedding.weight  # raises inside a step
    handle = handle_of(embedding)
    if handle is not None:
        table = handle.table
        part = slice(*table.ranges[table.rank])
        return _Columns(table.parameter.detach(), part, table.columns, handle.source.changing(table))
    if isinstance(weight, ColumnTensor):
        start, width = weight.share.start, weight.share.width
        return _Columns(weight.columns_Vd, slice(start, start + weight.columns_Vd.shape[1]), width, nullcontext())
    return _Columns(weight.detach(), slice(0, weight.shape[1]), weight.shape[1], nullcontext())


def _rows_of(vocabulary: Mapping[str, int] | Sequence[str] | None, rows: int) -> Mapping[str, int] | None:
    """The row of each word; all are in the table."""
    if vocabulary is None:
        return None
    if not isinstance(vocabulary, Mapping):
        vocabulary = {word: row for row, word in enumerate(vocabulary)}
    outside = next(((word, row) for word, row in vocabulary.items() if not 0 <= row < rows), None)
    if outside is not None:
        raise ValueError(f"The vocabulary gives {outside[0]!r} row {outside[1]}, and the table has {rows} rows.")
    return vocabulary


def _of_entries(entries: Iterator[Entry], rows: Mapping[str, int]) -> Iterator[Block]:
    """Words with their vectors, some at a time; of one row the first."""
    block: dict[int, Any] = {}
    for word, values in entries:
        block.setdefault(rows[word], values)
        if len(block) == _BATCH:
            yield list(block), np.stack(list(block.values()))
            block = {}
    if block:
        yield list(block), np.stack(list(block.values()))


def _of_array(
    file: VectorFile, columns: _Columns, rows: Mapping[str, int] | None, words: Sequence[str] | None
) -> Iterator[Block]:
    """Rows of an array, by their numbers or by their words."""
    if (rows is None) != (words is None):
        raise ValueError(
            f"{file.path} has vectors without words: give `vocabulary` and `words` (the word of each of its rows), or"
            " neither of them where its row i is row i of the table."
        )
    expected = columns.table_Vd.shape[0] if words is None else len(words)
    if len(file) > expected or (words is not None and len(file) != expected):
        what = "the table has" if words is None else "`words` has"
        raise ValueError(f"{file.path} has {len(file)} vectors, and {what} {expected}.")
    return _numbered(file, columns.part, rows, words)


def _numbered(
    file: VectorFile, part: slice, rows: Mapping[str, int] | None, words: Sequence[str] | None
) -> Iterator[Block]:
    for start, values in file.rows(part):
        if rows is None or words is None:
            yield list(range(start, start + len(values))), values
            continue
        places: dict[int, int] = {}
        for place, word in enumerate(words[start : start + len(values)]):
            if word in rows:
                places.setdefault(rows[word], place)
        yield list(places), values[list(places.values())]


def _write(table_Vd: Tensor, taken: Tensor, rows: list[int], values: Any) -> int:
    """Writes vectors to different rows, but for those that are taken; returns how many."""
    ids_R = torch.tensor(rows, dtype=torch.int64)
    free_R = ~taken[ids_R]
    ids_R = ids_R[free_R]
    taken[ids_R] = True
    values_Rd = torch.from_numpy(np.array(values, values.dtype.newbyteorder("=")))
    table_Vd.index_copy_(0, ids_R.to(table_Vd.device), values_Rd[free_R].to(table_Vd))
    return len(ids_R)
