"""AlltoAlls whose large messages travel by themselves, between real processes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_embrace.comm import ordered
from lightning_embrace.comm.breaking import break_group
from lightning_embrace.comm.ordered import LARGE_BYTES, OrderedAllToAll
from tests.support.ranks import Ranks

LARGE = LARGE_BYTES // 8  # elements of a float64 message that is just large enough


def new_group() -> tuple[Any, int, int]:
    """A gloo group of all ranks, this rank and N."""
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    return dist.new_group(backend="gloo"), rank, ranks


def splits_of(seed: int, ranks: int) -> list[list[int]]:
    """Elements from each rank to each: none, few, just too few to be large, just enough, and more."""
    pick = random.Random(seed)
    return [[pick.choice([0, 3, LARGE - 1, LARGE, 2 * LARGE + 1]) for _ in range(ranks)] for _ in range(ranks)]


def message(seed: int, of: int, to: int, elements: int) -> Tensor:
    return torch.arange(elements, dtype=torch.float64) + 1e6 * of + 1e4 * to + seed


def exchange(seeds: list[int], dtype: torch.dtype) -> list[Tensor]:
    """All exchanges at once, waited for in the opposite order; what is missing from the expected results."""
    group, rank, ranks = new_group()
    all_to_all = OrderedAllToAll(group, rank, ranks)
    under_way = []
    for seed in seeds:
        splits = splits_of(seed, ranks)
        outgoing = [message(seed, rank, to, n) for to, n in enumerate(splits[rank])]
        receive_splits = [splits[of][rank] for of in range(ranks)]
        received = torch.full((sum(receive_splits),), -1.0, dtype=torch.float64).to(dtype)
        sent = torch.cat(outgoing).to(dtype)
        work = all_to_all.start(received, sent, receive_splits, splits[rank])
        expected = torch.cat([message(seed, of, rank, n) for of, n in enumerate(receive_splits)]).to(dtype)
        under_way.append((work, received, expected, sent))
    for work, *_ in reversed(under_way):
        work.wait()
    return [expected[received != expected] for _, received, expected, _ in under_way]


def destinations() -> tuple[list[int], int]:
    """To whom this rank sends large messages, in order; and how many messages left before the second one ended."""
    group, rank, ranks = new_group()
    order: list[int] = []
    waited: list[int] = []
    real: Callable[..., Any] = dist.isend

    def isend(tensor: Tensor, to: int, *rest: Any) -> Any:
        order.append(to)
        work = real(tensor, to, *rest)
        return mock.Mock(wait=lambda: (waited.append(len(order)), work.wait()))

    splits = [LARGE] * ranks
    with mock.patch.object(ordered.dist, "isend", isend):
        received = torch.empty(sum(splits), dtype=torch.float64)
        OrderedAllToAll(group, rank, ranks).start(received, torch.ones_like(received), splits, splits).wait()
    return order, waited[0]


def vanish(last: int) -> str:
    """The last rank takes part in the small messages only, then breaks its connections; what the others are told."""
    group, rank, ranks = new_group()
    splits = [LARGE] * ranks
    received = torch.empty(sum(splits), dtype=torch.float64)
    if rank == last:
        dist.all_to_all_single(torch.empty(1), torch.empty(1), [0] * last + [1], [0] * last + [1], group=group)
        break_group(group)
        return "gone"
    work = OrderedAllToAll(group, rank, ranks).start(received, torch.ones_like(received), splits, splits)
    try:
        work.wait()
    except RuntimeError as error:
        return f"{work.is_completed()}: {error}"
    return "it ended well"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_message_arrives_whatever_its_size(ranks: Callable[[int], Ranks], dtype: torch.dtype) -> None:
    """Large and small messages of one exchange, and of several at the same time, end in their own places."""
    for missing in ranks(3).run(exchange, list(range(12)), dtype):
        assert [m.numel() for m in missing] == [0] * 12


def test_large_messages_go_round(ranks: Callable[[int], Ranks]) -> None:
    """Every rank begins with its neighbour, so that no link gets all messages at once; two leave at the same time."""
    for rank, (order, before_first_end) in enumerate(ranks(3).run(destinations)):
        assert order == [(rank + 1) % 3, (rank + 2) % 3]
        assert before_first_end == 2


def test_a_rank_that_breaks_off_ends_it_everywhere(ranks: Callable[[int], Ranks]) -> None:
    """A lost connection is an error where the exchange is waited for, not a wait until the time-out."""
    *others, gone = ranks(3).run(vanish, 2)
    assert gone == "gone"
    assert all(told.startswith("True: ") for told in others), others
