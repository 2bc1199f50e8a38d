"""Which parts of a file are in use."""

from __future__ import annotations


class Ranges:
    """Hands out parts of a file, and takes them back. The file is as long as its last part in use needs.

    Attributes:
        end: The file's length.
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: dict[int, int] = {}  # by where they begin, the lengths of parts that nobody uses; no two touch

    def take(self, length: int) -> int:
        """Where a part of such a length may be: in the smallest gap that is large enough, or at the end."""
        if not length:
            return self.end
        found = min(((n, start) for start, n in self._free.items() if n >= length), default=None)
        if found is None:
            self.end += length
            return self.end - length
        left, start = found
        del self._free[start]
        if left > length:
            self._free[start + length] = left - length
        return start

    def give(self, start: int, length: int) -> None:
        """Takes a part back."""
        if not length:
            return
        for other, n in list(self._free.items()):
            if other + n == start or start + length == other:
                del self._free[other]
                start, length = min(start, other), length + n
        if start + length == self.end:
            self.end = start
        else:
            self._free[start] = length
