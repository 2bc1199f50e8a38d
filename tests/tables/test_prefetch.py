"""Rows on their way: each rank gets what it wants, put together from the owners' columns."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_embrace.comm.base import Handle
from lightning_embrace.comm.fake import TwinCommunicator
from lightning_embrace.tables.prefetch import RowExchange
from lightning_embrace.tables.table import ShardedTable

ROWS = 7


class Later:
    """An exchange between fake ranks: takes place when it is waited for."""

    def __init__(self, world: World, rank: int, splits: list[int], wanted: list[int]) -> None:
        self.world, self.rank, self.wanted = world, rank, wanted

    def wait(self) -> Tensor:
        pieces = [send.split(splits)[self.rank] for send, splits in self.world.sent]
        assert [p.numel() for p in pieces] == self.wanted
        return torch.cat(pieces)

    def is_done(self) -> bool:
        return False


class World:
    """What all fake ranks have sent, in rank order."""

    def __init__(self) -> None:
        self.sent: list[tuple[Tensor, list[int]]] = []


class Rank(TwinCommunicator):
    def __init__(self, world: World, world_size: int, rank: int) -> None:
        super().__init__(world_size, rank)
        self.world = world

    def all_to_all(self, send, send_splits, receive_splits, kind, what, low_priority=False, urgent=True) -> Handle:  # type: ignore[no-untyped-def]
        assert kind == "rows" and not low_priority and len(self.world.sent) == self.rank
        assert send.numel() == sum(send_splits)
        self.world.sent.append((send, list(send_splits)))
        return Later(self.world, self.rank, list(send_splits), list(receive_splits))


def shards(weight: Tensor, index: int, world_size: int, wire: torch.dtype | None) -> list[ShardedTable]:
    made = []
    for rank in range(world_size):
        parameter = nn.Parameter(torch.empty_like(weight))
        table = ShardedTable(index, f"t{index}", parameter, False, weight.shape[1], rank, world_size, wire)
        parameter.data = weight[:, slice(*table.ranges[rank])].clone()
        table.forget()
        made.append(table)
    return made


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.lists(st.integers(1, 6), min_size=1, max_size=2), st.booleans())
def test_each_rank_gets_its_rows(data: st.DataObject, n: int, columns: list[int], halved: bool) -> None:
    """Any wants, D < N, tables of two dtypes in one message; an owner notes what was asked of it, in order."""
    wire = torch.bfloat16 if halved else None
    dtypes = [torch.float64, torch.float32]
    weights = [torch.arange(ROWS * d, dtype=dtypes[k]).view(ROWS, d) for k, d in enumerate(columns)]
    tables = [shards(w, k, n, wire) for k, w in enumerate(weights)]
    ids = st.lists(st.integers(0, ROWS - 1), unique=True, max_size=4)
    wants = [{k: torch.tensor(data.draw(ids), dtype=torch.int64) for k in range(len(columns))} for _ in range(n)]
    world = World()
    exchanges = [RowExchange(Rank(world, n, r), [t[r] for t in tables], wants, "rows") for r in range(n)]
    for rank in range(n):
        assert all(len(t[rank].window) == 0 for t in tables), "nothing is here before it has landed"
        exchanges[rank].land()
        for k, table in enumerate(tables):
            wanted, window = wants[rank][k], table[rank].window
            assert len(window) == len(wanted)
            assert torch.equal(
                window.rows_UD[window.positions(wanted)] if len(wanted) else window.rows_UD, weights[k][wanted]
            )
            assert window.rows_UD.dtype == weights[k].dtype
            assert [table[rank].asked_ids(r).tolist() for r in range(n)] == [w[k].tolist() for w in wants]


def test_abandoned_rows_are_not_used() -> None:
    """Somebody has changed the weights after they were read: they land nowhere, and nobody asked for them."""
    tables = shards(torch.ones(ROWS, 2), 0, 1, None)
    exchange = RowExchange(Rank(World(), 1, 0), tables, [{0: torch.tensor([1, 2])}], "rows")
    exchange.abandon()
    assert len(tables[0].window) == 0 and tables[0].asked_ids(0).numel() == 0


def test_what_is_read_is_what_was_there_when_it_left() -> None:
    """Early rows leave before the optimizer steps, and a copy of them: what moves later does not move them."""
    tables = shards(torch.ones(ROWS, 2), 0, 1, None)
    tables[0].settle = lambda: (_ for _ in ()).throw(AssertionError("early rows wait for no pending update"))
    exchange = RowExchange(Rank(World(), 1, 0), tables, [{0: torch.tensor([3])}], "rows")
    tables[0].parameter.data.fill_(9.0)
    exchange.land()
    assert tables[0].window.rows_UD.tolist() == [[1.0, 1.0]]
