"""What is packed is unpacked as it was, for every rank, width and number of pieces."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_embrace.comm.fake import TwinCommunicator
from lightning_embrace.tables.packing import Counts, pack, unpack
from lightning_embrace.tables.table import ShardedTable


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_there_and_back(data: st.DataObject, world_size: int, columns: list[int]) -> None:
    """Owners get their columns of each piece of each table and rank, also where D < N and where a piece is empty."""
    ranks = range(world_size)
    sizes = st.lists(st.integers(0, 3), max_size=3)
    counts: Counts = {(r, t): data.draw(sizes) for r in ranks for t in range(len(columns))}
    grads: dict[tuple[int, int], list[Tensor]] = {
        (r, t): [torch.randn(n, columns[t]) for n in counts[r, t]] for r in ranks for t in range(len(columns))
    }
    tables = [
        [
            ShardedTable(k, f"t{k}", nn.Parameter(torch.empty(5, d)), False, d, rank, world_size)
            for k, d in enumerate(columns)
        ]
        for rank in ranks
    ]
    packed = [
        pack(TwinCommunicator(world_size, r), tables[r], {t: grads[r, t] for t in range(len(columns))}, counts)
        for r in ranks
    ]
    for rank in ranks:
        pieces = [send.split(sends)[rank] for send, sends, _ in packed]
        assert packed[rank][2] == [piece.numel() for piece in pieces]
        blocks = unpack(torch.cat(pieces), tables[rank], counts, rank, packed[rank][2])
        for (source, t), parts in blocks.items():
            columns_here = slice(*tables[rank][t].ranges[rank])
            assert [p.shape[1] for p in parts] == [tables[rank][t].widths[rank]] * len(parts)
            assert all(torch.equal(p, g[:, columns_here]) for p, g in zip(parts, grads[source, t]))
            assert len(parts) == len(grads[source, t])


def test_in_the_dtype_of_the_wire() -> None:
    table = ShardedTable(0, "t", nn.Parameter(torch.empty(5, 2)), False, 2, 0, 2, torch.bfloat16)
    send, sends, wanted = pack(TwinCommunicator(2), [table], {0: [torch.ones(3, 2)]}, {(0, 0): [3], (1, 0): [1]})
    assert (send.dtype, sends, wanted) == (torch.bfloat16, [3, 3], [3, 1])
    empty, sends, wanted = pack(TwinCommunicator(2), [table], {0: []}, {(0, 0): [], (1, 0): []})
    assert (empty.dtype, empty.numel(), sends, wanted) == (torch.bfloat16, 0, [0, 0], [0, 0])
