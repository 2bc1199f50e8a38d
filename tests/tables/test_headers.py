"""The header with which every joint act begins, without processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_embrace.comm.base import Done, Handle
from lightning_embrace.comm.fake import TwinCommunicator
from lightning_embrace.tables.headers import ACT, END, ROWS, Act, Header, act_together, gather_headers


class Other(TwinCommunicator):
    """Rank 0 with a rank 1 that says something else."""

    def __init__(self, other: list[Header]) -> None:
        super().__init__(2)
        self._others = iter(other)

    def gather(self, header_H: Tensor, what: str) -> Handle:
        mine = super().gather(header_H, what).wait()[0]
        return Done(torch.stack([mine, torch.tensor(next(self._others))]))


def act_header(act: Act, *words: int) -> Header:
    return Header(ACT, act, *words)


@pytest.mark.parametrize("count", [0, 1, 6, 7, 13])
def test_words(count):
    """As many words as are said arrive, in as many headers of one size as they need."""
    words = list(range(100, 100 + count))
    comm = TwinCommunicator(3)
    assert act_together(comm, Act.STEP, words) == [words] * 3
    said = [event for event in comm.events if event.operation == "gather"]
    assert {event.elements for event in said} == {len(Header._fields)}
    assert len(said) == max(1, -(-count // 6))


@pytest.mark.parametrize(
    ("mine", "other", "message"),
    [
        (act_header(Act.STATE), Header(ROWS, 1, 5), "rank 0 gathers the state .*, rank 1 is in a training step"),
        (Header(END), act_header(Act.VALIDATION), "rank 0 is in a training step, rank 1 starts validation"),
        (act_header(Act.TEARDOWN), act_header(Act.STEP), "rank 0 has ended the training, rank 1 begins a training"),
    ],
)
def test_ranks_apart(mine, other, message):
    """Every rank raises, and says what each of them does."""
    with pytest.raises(RuntimeError, match=message):
        gather_headers(Other([other]), mine, "test")


def test_ranks_together():
    other = [Header(ROWS, 1, 5), act_header(Act.STATE, 7)]
    comm = Other(other)
    assert gather_headers(comm, Header(END), "test") == [Header(END), other[0]]
    assert act_together(comm, Act.STATE, [3]) == [[3], [7]]


def test_every_act_says_what_it_is():
    assert len({str(act) for act in Act}) == len(Act)
