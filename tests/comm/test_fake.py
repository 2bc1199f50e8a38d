"""The recording communicator must not hide mistakes from the tests that use it."""

from __future__ import annotations

import pytest
import torch

from lightning_embrace.comm.base import Communicator
from lightning_embrace.comm.fake import TwinCommunicator


def test_an_exchange_takes_place_when_it_is_waited_for() -> None:
    """Code that reads a result too early gets a wrong one, as with a real backend."""
    comm: Communicator = TwinCommunicator(3)
    flat = torch.ones(2)
    handle = comm.all_reduce(flat, "dense", "gradients")
    assert flat.tolist() == [1, 1]
    assert handle.wait().tolist() == flat.tolist() == [3, 3]


def test_others_are_twins() -> None:
    comm = TwinCommunicator(2, rank=1)
    assert comm.gather(torch.tensor([4, 5]), "header").wait().tolist() == [[4, 5], [4, 5]]
    sent = torch.tensor([1.0, 2.0, 3.0])
    assert comm.all_to_all(sent, [1, 2], [2, 2], "rows", "rows").wait().tolist() == [2, 3, 2, 3]
    assert comm.broadcast(sent, "setup", "weights").wait() is sent
    with pytest.raises(AssertionError, match="twins"):
        comm.all_to_all(sent, [1, 2], [1, 2], "rows", "rows")


def test_everything_is_recorded_in_order() -> None:
    comm = TwinCommunicator(2)
    first = comm.all_reduce(torch.ones(2, dtype=torch.float64), "dense", "a")
    comm.gather(torch.tensor([1]), "b")
    first.wait()
    comm.broadcast(torch.ones(3), "setup", "c")
    assert [(e.operation, e.what, e.elements) for e in comm.events] == [
        ("all_reduce", "a", 2),
        ("gather", "b", 1),
        ("wait", "a", 2),
        ("broadcast", "c", 3),
    ]
    assert comm.issued() == ["a", "b", "c"]
    assert comm.issued("gather", "broadcast") == ["b", "c"]
    assert comm.traffic.sent == {"dense": 16, "header": 8, "setup": 12}
