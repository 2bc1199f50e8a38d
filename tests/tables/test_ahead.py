"""What the ranks tell each other of their next batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace.comm.base import Done, Handle
from lightning_embrace.comm.fake import TwinCommunicator
from lightning_embrace.tables.ahead import Ahead, Outlook, Plan
from lightning_embrace.tables.headers import AHEAD, Header
from lightning_embrace.tables.table import ShardedTable


def tables(count: int = 2) -> list[ShardedTable]:
    return [ShardedTable(k, f"t{k}", nn.Parameter(torch.empty(9, 2)), False, 2, 0, 2) for k in range(count)]


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def outlook(
    known: list[Tensor | None], word: int = 0, moved: bool = False, splits: Any = None, keeps: Any = None
) -> Outlook:
    yes = [True] * len(known)
    return Outlook(known, word, moved, splits or yes, keeps or yes)


class Other(TwinCommunicator):
    """The other rank says and sends something of its own."""

    def __init__(self, header: Header, payload: list[int]) -> None:
        super().__init__(2)
        self.header, self.payload = header, payload

    def gather(self, header_H: Tensor, what: str) -> Handle:
        super().gather(header_H, what)
        return Done(torch.stack([header_H, torch.tensor(self.header)]))

    def all_to_all(self, send: Tensor, *args: Any, **kwargs: Any) -> Handle:
        self.sent = send
        self.wanted = args[1]
        return Done(torch.tensor(self.payload, dtype=send.dtype))


def test_twins_agree() -> None:
    """All ids of all ranks; a table that is not known to this rank is known to nobody."""
    comm = Other(Header(AHEAD, 0, 4, 0b01, 0b11, 0b11), [2, -1, 7, 8])
    ahead = Ahead(comm, tables())
    ahead.tell(outlook([ids(1, 3), None], word=2), step=4, version=0)
    ahead.hear()
    assert ahead.words == [2, 0] and not ahead.moved
    assert ahead.plan() == ahead.nothing, "nothing was asked for yet"
    ahead.ask()
    assert comm.sent.tolist() == [2, -1, 1, 3] and list(comm.wanted) == [0, 4]
    plan = ahead.plan()
    assert plan.ids[0] is not None and [i.tolist() for i in plan.ids[0]] == [[1, 3], [7, 8]]
    assert plan.ids[1] is None and plan.union(1) is None
    assert plan.union(0).tolist() == [1, 3, 7, 8]


def test_one_rank_is_enough_to_object() -> None:
    """Its weights have moved, a table must stay whole, rows move without a gradient: all ranks act alike."""
    comm = Other(Header(AHEAD, 1 + 2 * 5, 2, 0b11, 0b10, 0b01), [0, 0])
    ahead = Ahead(comm, tables())
    ahead.tell(outlook([ids(), ids()]), 0, 0)
    ahead.hear()
    assert ahead.moved and ahead.words == [0, 5]
    assert ahead.splits == [False, True] and ahead.keeps == [True, False]
    ahead.tell(outlook([ids(), ids()], moved=True, splits=[True, False]), 1, 0)
    ahead.hear()
    assert ahead.moved and ahead.splits == [False, False]


def test_nothing_travels_where_nobody_knows() -> None:
    """And the same where some rank does not know: a table needs all."""
    for mine, theirs in (([None, None], 0b11), ([ids(1), ids(2)], 0b00), ([ids(1), None], 0b10)):
        comm = Other(Header(AHEAD, 0, 2, theirs, 3, 3), [])
        ahead = Ahead(comm, tables())
        ahead.tell(outlook(mine), 0, 0)
        ahead.hear()
        ahead.ask()
        assert not hasattr(comm, "sent")
        assert ahead.plan() == ahead.nothing == Plan((None, None))


def test_asked_once_a_step() -> None:
    comm = TwinCommunicator(1)
    ahead = Ahead(comm, tables(1))
    for step in range(2):
        ahead.tell(outlook([ids(4)]), step, 0)
        ahead.hear()
        ahead.ask()
        ahead.ask()
        assert [i.tolist() for i in ahead.plan().ids[0] or ()] == [[4]]
    assert comm.issued("all_to_all") == ["ids of the next step"] * 2


def test_ranks_with_other_weights_are_told() -> None:
    """`load_state_dict` on one rank alone, or a step."""
    ahead = Ahead(Other(Header(AHEAD, version=3), []), tables())
    ahead.tell(outlook([None, None]), 0, 2)
    with pytest.raises(RuntimeError, match=r"changed \[2, 3\] times"):
        ahead.hear()
