"""What is checked before Horovod sees an exchange: it would drop elements in silence, or hang."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from lightning_embrace.comm.control import RankFailedError
from lightning_embrace.comm.horovod_backend import HorovodCommunicator, check_splits
from lightning_embrace.comm.traffic import Traffic


@pytest.mark.parametrize(
    ("send", "send_splits", "receive_splits", "message"),
    [
        (torch.ones(3), [1, 1], [1, 1], "send_splits add up to 2"),
        (torch.ones(3), [2, 2], [1, 1], "send_splits add up to 4"),
        (torch.ones(3), [3], [1, 1], "send_splits must be 2 numbers"),
        (torch.ones(3), [4, -1], [1, 1], "send_splits must be 2 numbers from 0"),
        (torch.ones(3), [1, 2], [1, 2, 3], "receive_splits must be 2 numbers"),
        (torch.ones(3), [1, 2], [1, 1 << 31], "receive_splits must be 2 numbers"),
        (torch.ones(3, 1), [1, 2], [1, 1], "one dimension"),
        (torch.ones(6)[::2], [1, 2], [1, 1], "contiguous"),
    ],
)
def test_splits_that_do_not_fit(send: Tensor, send_splits: list[int], receive_splits: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        check_splits(send, send_splits, receive_splits, 2, "rows of step 4")
    assert "'rows of step 4'" in str(raised.value)


@pytest.mark.parametrize("splits", [[0, 0], [0, 3], [1, 2]])
def test_splits_that_fit(splits: list[int]) -> None:
    check_splits(torch.ones(sum(splits)), splits, [0, 5], 2, "rows")


class _News:
    """A control channel on which the cause of a break is on its way."""

    step = 4

    def __init__(self) -> None:
        self.known = False

    def at(self, exchange: str) -> None:
        pass

    def check(self) -> None:
        if self.known:
            raise RankFailedError(1, 4, "rows", "its process ended without a word", died=True)

    def wait_for_failure(self, timeout: float) -> RankFailedError | None:
        self.known = True
        return RankFailedError(1, 4, "rows", "its process ended without a word", died=True)


def test_what_comes_after_a_break_waits_for_its_cause() -> None:
    """Another thread begins none; its own error would be told to all as the first one, and name this rank."""
    comm = object.__new__(HorovodCommunicator)
    comm.control, comm.world_size, comm.traffic = _News(), 2, Traffic()  # type: ignore[assignment]
    comm._counting, comm._broken = threading.Lock(), True
    with pytest.raises(RankFailedError, match="rank 1 died"):
        comm.gather(torch.tensor([1]), "header")
