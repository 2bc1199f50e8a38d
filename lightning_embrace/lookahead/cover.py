"""Learns which integer tensors of a batch cover which table's look-ups. Pure set cover, no transformation of ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_embrace.lookahead.leaves import leaves

# this many observed steps must agree; a table without a cover after _PATIENCE of them has none
_AGREE, _PATIENCE = 2, 5
# so many look-ups in a row that were not foreseen drop what was learned; and it is learned so many times at most
_MISSES, _LESSONS = 3, 3
# a cover whose ids are more than this many times those looked up fetches more than it saves
_WASTE = 4


@dataclass
class _Step:
    """What one step says about one table: which look-ups each tensor covers, and how many ids it has besides."""

    looked_up: int
    covered: dict[str, Tensor]
    besides: dict[str, int]


@dataclass
class _Table:
    rows: int
    steps: list[_Step] = field(default_factory=list)
    #: the covers that came out, step by step
    covers: list[tuple[str, ...] | None] = field(default_factory=list)
    cover: tuple[str, ...] | None = None
    settled: bool = False
    misses: int = 0
    lessons: int = 1

    def add(self, step: _Step) -> None:
        self.steps.append(step)
        self.covers.append(smallest_cover(self.steps))
        agreed = self.covers[-1] is not None and self.covers[-_AGREE:] == [self.covers[-1]] * _AGREE
        if agreed or len(self.steps) == _PATIENCE:
            self.cover = self.covers[-1] if agreed else None
            self.settled = True
            self.steps, self.covers = [], []

    def forget(self) -> None:
        self.cover, self.misses = None, 0
        self.lessons += 1
        self.settled = self.lessons > _LESSONS


class Cover:
    """Which tensors of the batch hold the ids of each table.

    In every step of learning: :meth:`note` before the user's code sees the batch, :meth:`observe` after it.

    Args:
        rows: Number of rows of each table, by index.
    """

    def __init__(self, rows: list[int]) -> None:
        self._tables = [_Table(n) for n in rows]
        self._noted: dict[str, Tensor] = {}

    @property
    def learning(self) -> bool:
        """There are tables of which it is not known yet."""
        return not all(table.settled for table in self._tables)

    @property
    def known(self) -> list[bool]:
        """The tables whose look-ups can be foreseen, by index."""
        return [table.cover is not None for table in self._tables]

    @property
    def paths(self) -> list[tuple[str, ...] | None]:
        """What was learned, by table."""
        return [table.cover for table in self._tables]

    def note(self, batch: Any) -> None:
        """Keeps the ids of a batch that is about to be trained on; the training step may change the batch itself."""
        self._noted = {path: unique_ids(t) for path, t in leaves(batch).items()} if self.learning else {}

    def observe(self, looked_up: Mapping[int, Tensor]) -> None:
        """Learns from the step of the noted batch.

        Args:
            looked_up: Unique ids that were looked up, by table; a table without look-ups may be missing.
        """
        noted, self._noted = self._noted, {}
        for index, ids_U in looked_up.items():
            table = self._tables[index]
            if not table.settled and ids_U.numel() > 0 and noted:
                table.add(_compare(noted, ids_U, table.rows))

    def ids(self, batch: Any) -> dict[int, Tensor | None]:
        """The ids that a batch will look up, or more.

        Args:
            batch: A batch, as the loader gave it.

        Returns:
            Sorted unique int64 ids in the table's range by table; None: not known.
        """
        wanted = {path for table in self._tables for path in table.cover or ()}
        found = {path: unique_ids(t) for path, t in leaves(batch).items() if path in wanted} if wanted else {}
        return {index: _join(table, found) for index, table in enumerate(self._tables)}

    def checked(self, index: int, foreseen: bool) -> None:
        """Tells whether a table's foreseen ids had all that was looked up; often wrong, they are learned anew."""
        table = self._tables[index]
        table.misses = 0 if foreseen else table.misses + 1
        if table.cover is not None and table.misses >= _MISSES:
            table.forget()

    def unlearn(self, index: int) -> None:
        """Drops what was learned about a table: the ranks did not agree, say."""
        self._tables[index].forget()


def unique_ids(tensor: Tensor) -> Tensor:
    """Sorted unique int64 ids."""
    ids_U: Tensor = torch.unique(tensor.flatten())
    return ids_U.long()


def in_range(ids_U: Tensor, rows: int) -> Tensor:
    """Drops what cannot be an id: padding such as −100."""
    return ids_U.masked_select((ids_U >= 0) & (ids_U < rows))


def smallest_cover(steps: list[_Step]) -> tuple[str, ...] | None:
    """Chooses the fewest tensors that cover the look-ups of every step.

    Greedily; of equals the one with fewer ids besides, then the one that comes first in the batch.

    Args:
        steps: What was observed.

    Returns:
        Paths in the order of the batch; None: there is no cover, or it has far too many ids.
    """
    order = {path: place for place, path in enumerate(dict.fromkeys(p for step in steps for p in step.covered))}
    covered = {path: _over_steps(path, steps) for path in order}
    besides = {path: sum(step.besides.get(path, 0) for step in steps) for path in order}
    missing = torch.ones(sum(step.looked_up for step in steps), dtype=torch.bool)
    chosen: list[str] = []
    while missing.any():
        gains = {path: int((mask & missing).sum()) for path, mask in covered.items()}
        best = min(order, key=lambda path: (-gains[path], besides[path], order[path]), default=None)
        if best is None or gains[best] == 0:
            return None
        chosen.append(best)
        missing &= ~covered[best]
    for path in sorted(chosen, key=lambda path: -besides[path]):  # a later choice may have made an earlier one needless
        rest = [covered[other] for other in chosen if other != path]
        if rest and torch.stack(rest).any(0).all():
            chosen.remove(path)
    if sum(besides[path] for path in chosen) > (_WASTE - 1) * missing.numel():
        return None
    return tuple(sorted(chosen, key=order.__getitem__))


def _over_steps(path: str, steps: list[_Step]) -> Tensor:
    return torch.cat([s.covered.get(path, torch.zeros(s.looked_up, dtype=torch.bool)) for s in steps])


def _compare(noted: dict[str, Tensor], ids_U: Tensor, rows: int) -> _Step:
    step = _Step(ids_U.numel(), {}, {})
    for path, leaf in noted.items():
        possible = in_range(leaf.to(ids_U.device), rows)
        mask = torch.isin(ids_U, possible).cpu()
        step.covered[path] = mask
        step.besides[path] = possible.numel() - int(mask.sum())
    return step


def _join(table: _Table, found: dict[str, Tensor]) -> Tensor | None:
    if table.cover is None or any(path not in found for path in table.cover):
        return None
    parts = [found[path] for path in table.cover]
    return in_range(parts[0] if len(parts) == 1 else torch.unique(torch.cat(parts)), table.rows)
