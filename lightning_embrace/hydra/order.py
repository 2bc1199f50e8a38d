"""In which order shards are needed: as in the last step."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Order(Generic[Key]):
    """Remembers one round of visits and foretells the next. A wrong guess costs time, never more."""

    def __init__(self) -> None:
        self._before: list[Key] = []
        self._now: list[Key] = []

    def begin(self) -> None:
        """A new round begins."""
        if self._now:
            self._before = self._now
        self._now = []

    def visit(self, key: Key) -> Key | None:
        """Notes a visit; repeated ones count once.

        Returns:
            What comes next, if the last round is a guide.
        """
        if not self._now or self._now[-1] != key:
            self._now.append(key)
        at = len(self._now)
        if not self._before or at > len(self._before) or self._before[at - 1] != key:
            return None
        return self._before[at % len(self._before)]
