"""What the next step will look up: every rank tells the others while the present step runs.

A step begins with a header from every rank; the ids of its next batch follow when the look-ups of the step are over.
Whatever a rank does not know beforehand, or knows wrongly, the rounds fetch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_embrace.comm.base import Communicator, Handle
from lightning_embrace.tables.headers import AHEAD, BITS, Header, check_versions, read_headers, send_header
from lightning_embrace.tables.table import ShardedTable


class Outlook(NamedTuple):
    """What one rank says when a step begins.

    Attributes:
        ids: By table, the ids that its next batch looks up, unique and valid; None where it does not know.
        word: For the loaders.
        moved: Its tables' weights may have changed since the optimizer's last step.
        splits: By table, whether the update of a step may come in parts.
        keeps: By table, whether rows without gradient keep their weights in this step.
    """

    ids: Sequence[Tensor | None]
    word: int
    moved: bool
    splits: Sequence[bool]
    keeps: Sequence[bool]


class Plan(NamedTuple):
    """What the ranks will look up in a step, by table and rank; None for tables that not all ranks know of."""

    ids: tuple[tuple[Tensor, ...] | None, ...]

    def union(self, table: int) -> Tensor | None:
        """All rows of a table that any rank will look up."""
        by_rank = self.ids[table]
        return None if by_rank is None else torch.unique(torch.cat(by_rank))


class Ahead:
    """Agrees on the ranks' outlooks.

    Args:
        comm: Carries the exchanges.
        tables: All sharded tables, by index.
    """

    def __init__(self, comm: Communicator, tables: list[ShardedTable]) -> None:
        self._comm = comm
        self._tables = tables
        self._dtype = torch.int64 if any(t.id_dtype == torch.int64 for t in tables) else torch.int32
        self._payload: Tensor | None = None
        self._lengths: list[int] = []
        self._said: Handle | None = None
        self._handle: Handle | None = None
        self._known = 0
        self.nothing = Plan(tuple(None for _ in tables))
        #: the ranks' words
        self.words: list[int] = []
        #: some rank's tables may have changed since the last step
        self.moved = False
        self.splits: list[bool] = [False] * len(tables)
        self.keeps: list[bool] = [False] * len(tables)

    def tell(self, outlook: Outlook, step: int, version: int) -> None:
        """Begins a step; :meth:`hear` follows. Collective.

        Args:
            outlook: This rank's.
            step: The step's number, for errors.
            version: How often the tables have changed.
        """
        parts = [torch.tensor([-1 if ids is None else ids.numel() for ids in outlook.ids], dtype=self._dtype)]
        parts += [ids.to("cpu", self._dtype) for ids in outlook.ids if ids is not None]
        self._payload = torch.cat(parts).to(self._comm.device)
        known = _bits(ids is not None for ids in outlook.ids)
        header = Header(
            AHEAD,
            int(outlook.moved) + 2 * outlook.word,
            self._payload.numel(),
            known,
            _bits(outlook.splits),
            _bits(outlook.keeps),
            version,
        )
        self._said = send_header(self._comm, header, f"step {step}'s beginning")
        self._handle = None

    def hear(self) -> None:
        """Waits for what the others said.

        Raises:
            RuntimeError: The ranks do different things, or have different versions.
        """
        assert self._said is not None
        headers = read_headers(self._said.wait())
        check_versions(headers, AHEAD)
        self._lengths = [h.ids for h in headers]
        self.words = [h.table >> 1 for h in headers]
        self.moved = any(h.table & 1 for h in headers)
        self._known = _all(h.bags for h in headers)
        splits, keeps = _all(h.mode for h in headers), _all(h.bad_id for h in headers)
        self.splits = [bool(splits >> k & 1) for k in range(len(self._tables))]
        self.keeps = [bool(keeps >> k & 1) for k in range(len(self._tables))]

    def ask(self) -> bool:
        """Sends the ids on their way, when no look-up of this step needs other ranks any more. Collective.

        Returns:
            Whether there will be a plan.
        """
        if self._known == 0:
            return False
        if self._handle is not None:
            return True
        assert self._payload is not None
        comm, me = self._comm, self._comm.rank
        sends = [0 if r == me else self._payload.numel() for r in range(comm.world_size)]
        wanted = [0 if r == me else length for r, length in enumerate(self._lengths)]
        send = self._payload.repeat(comm.world_size - 1)
        self._handle = comm.all_to_all(send, sends, wanted, "ids", "ids of the next step", urgent=False)
        return True

    def plan(self) -> Plan:
        """Waits for all ranks' ids."""
        if self._handle is None:
            return self.nothing
        assert self._payload is not None
        received = self._handle.wait()
        lengths = [0 if r == self._comm.rank else n for r, n in enumerate(self._lengths)]
        pieces = list(received.split(lengths))
        pieces[self._comm.rank] = self._payload
        self._handle = None
        by_rank = [self._read(piece) for piece in pieces]
        return Plan(
            tuple(
                tuple(ids[k] for ids in by_rank) if self._known >> k & 1 else None  # type: ignore[misc]
                for k in range(len(self._tables))
            )
        )

    def _read(self, piece: Tensor) -> list[Tensor | None]:
        counts = piece[: len(self._tables)].tolist()
        parts = iter(piece[len(self._tables) :].long().split([max(0, c) for c in counts]))
        ids = [next(parts) for _ in counts]
        return [None if count < 0 else part for count, part in zip(counts, ids)]


def _bits(flags: Iterable[bool]) -> int:
    return sum(1 << k for k, flag in enumerate(flags) if flag and k < BITS)


def _all(fields: Iterable[int]) -> int:
    result = (1 << BITS) - 1
    for field in fields:
        result &= field
    return result
