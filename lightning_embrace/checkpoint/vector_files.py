"""Files of word vectors, read as a stream: of each vector only the columns that are wanted are made numbers."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

Format = Literal["auto", "text", "binary", "npy"]
#: a word, or the number of a row, and its vector's wanted columns [d]
Entry = tuple[Any, Any]
#: whether a word's vector is wanted
Wanted = Callable[[str], bool]

_NPY = b"\x93NUMPY"
#: beginnings of files that are read as text and are none
_OTHERS = {
    b"PK": "a zip archive: unpack it",
    b"\x1f\x8b": "compressed by gzip: let its name end with .gz",
    b"\x89HDF": "an HDF5 file",
    b"\x80": "a pickle",
}
#: rows of an array that are in memory at once
_ROWS = 4096
#: no line and no word of a file of vectors is longer
_LONGEST = 1 << 20


class VectorFile:
    """A file of word vectors, of which the format and the number of columns are known.

    Args:
        path: word2vec's or GloVe's text, also with ``.gz`` behind it; word2vec's binary; or NumPy's ``.npy``.
        columns: D that is expected.
        format: ``"auto"``: by what the file begins with.

    Raises:
        ValueError: The format is unknown, or the vectors have another dimension.
    """

    def __init__(self, path: str | Path, columns: int, format: Format = "auto") -> None:
        self.path, self.columns = Path(path), columns
        with self._open() as file:
            start = file.read(len(_NPY))
            found: Format = "npy" if start == _NPY else "text"
            if found == "text":
                self._refuse_others(start)
                file.seek(0)
                self.count = self._read_header(file)
                if self.count is not None and not self._is_line(file.readline(_LONGEST)):
                    found = "binary"
        if format not in ("auto", found):
            raise ValueError(f"{self.path} was said to be {format!r}, and it is {found!r}.")
        self.format = found
        if found == "npy":
            self._array = self._map()

    def entries(self, part: slice, wanted: Wanted) -> Iterator[Entry]:
        """Words and some columns of their vectors, in the order of the file.

        Args:
            part: Which columns.
            wanted: Asked for each word; what is not wanted is passed over.

        Yields:
            ``(word, values [d])``.

        Raises:
            ValueError: A line is no vector of D numbers, or the file ends too early.
        """
        with self._open() as file:
            yield from self._text(file, part, wanted) if self.format == "text" else self._binary(file, part, wanted)

    def rows(self, part: slice) -> Iterator[tuple[int, Any]]:
        """Blocks of an array's rows: the number of the first one, and ``values [R, d]``."""
        for start in range(0, len(self._array), _ROWS):
            yield start, np.asarray(self._array[start : start + _ROWS, part])

    def __len__(self) -> int:
        """Rows of an array."""
        return len(self._array)

    # ---- text --------------------------------------------------------------------------------------------------------

    def _text(self, file: IO[bytes], part: slice, wanted: Wanted) -> Iterator[Entry]:
        has_header = self._read_header(file) is not None
        lines = 0
        for lines, line in enumerate(file, 1):
            # words may have spaces, vectors are the last D fields
            word, *numbers = line.rstrip(b" \r\n").rsplit(b" ", self.columns)
            if len(numbers) != self.columns:
                raise self._broken(f"line {lines + has_header} has {len(numbers)} numbers instead of {self.columns}")
            text = word.decode("utf-8", "replace")
            if wanted(text):
                try:
                    yield text, np.array([float(number) for number in numbers[part]])
                except ValueError as error:
                    raise self._broken(f"line {lines + has_header}: {error}") from error
        if self.count is not None and lines < self.count:
            raise self._broken(f"it has {lines} vectors, and its first line says {self.count}")

    def _is_line(self, line: bytes) -> bool:
        """Whether a line of a file with a header is text."""
        fields = line.rstrip(b" \r\n").rsplit(b" ", self.columns)
        try:
            return len([float(field) for field in fields[1:]]) == self.columns
        except ValueError:
            return False

    def _read_header(self, file: IO[bytes]) -> int | None:
        """Checks the dimension, which the first line tells; with word2vec's ``V D`` the file is behind it then."""
        line = file.readline(_LONGEST)
        fields = line.split()
        if len(fields) == 2 and all(field.isdigit() for field in fields):
            self._check_columns(int(fields[1]))
            return int(fields[0])
        if b"\0" in line or b"\t" in line or len(fields) < 2 or not _is_number(fields[-1]):
            raise ValueError(
                f"{self.path} is in no known format. Known are the texts of word2vec and GloVe (a word and its numbers"
                " in a line, with spaces between), word2vec's binary files, and NumPy's .npy."
            )
        self._check_columns(len(line.rstrip(b" \r\n").split(b" ")) - 1)
        file.seek(0)
        return None

    # ---- binary ------------------------------------------------------------------------------------------------------

    def _binary(self, file: IO[bytes], part: slice, wanted: Wanted) -> Iterator[Entry]:
        count = self._read_header(file)
        size = 4 * self.columns
        for number in range(count or 0):
            word = _word(file)
            raw = file.read(size)
            if word is None or len(raw) < size:
                raise self._broken(f"it ends in vector {number + 1} of {count}")
            text = word.decode("utf-8", "replace")
            if wanted(text):
                yield text, np.frombuffer(raw, "<f4")[part]

    # ---- arrays ------------------------------------------------------------------------------------------------------

    def _map(self) -> Any:
        try:
            array = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise self._broken(str(error)) from error
        if array.ndim != 2 or array.dtype.kind != "f" or array.dtype.itemsize > 8:
            raise ValueError(
                f"{self.path} holds an array of shape {array.shape} and dtype {array.dtype}; needed are floating-point"
                f" numbers of shape [words, {self.columns}]."
            )
        self._check_columns(array.shape[1])
        return array

    # ---- common ------------------------------------------------------------------------------------------------------

    def _open(self) -> IO[bytes]:
        return gzip.open(self.path, "rb") if self.path.suffix == ".gz" else open(self.path, "rb")  # type: ignore[return-value]

    def _check_columns(self, found: int) -> None:
        if found != self.columns:
            raise ValueError(f"{self.path} has vectors of {found} numbers, and the table has {self.columns} columns.")

    def _refuse_others(self, start: bytes) -> None:
        for beginning, kind in _OTHERS.items():
            if start.startswith(beginning):
                raise ValueError(f"{self.path} is in no known format: it looks like {kind}.")

    def _broken(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is broken: {what}.")


def _word(file: IO[bytes]) -> bytes | None:
    """A word of a binary file, up to the space behind it; some programs write a line's end after each vector."""
    word = bytearray()
    while len(word) < _LONGEST:
        byte = file.read(1)
        if byte == b" ":
            return bytes(word)
        if not byte:
            return None
        if byte != b"\n":
            word += byte
    return None


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True
