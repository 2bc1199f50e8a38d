"""The four schedules: what travels when (paper, section 4.2)."""

from __future__ import annotations

from typing import Literal, NamedTuple

Name = Literal["2d", "horizontal", "vertical", "fifo"]


class Schedule(NamedTuple):
    """A point in the two dimensions.

    Attributes:
        horizontal: Between blocks: dense gradients go on the wire in the order of need, and the next forward pass waits
            for each block by itself.
        vertical: Inside a table: of its gradient, rows that nobody looks up next travel later, and rows of the next
            batch that this step leaves alone travel earlier.
    """

    horizontal: bool
    vertical: bool

    @classmethod
    def of(cls, name: Name) -> Schedule:
        """The schedule of a name; ``"fifo"``: in the order in which everything comes, waited for at once."""
        return cls(name in ("2d", "horizontal"), name in ("2d", "vertical"))

    @property
    def ahead(self) -> bool:
        """Knowing the next batch is of use."""
        return self.horizontal or self.vertical


FIFO = Schedule(False, False)
