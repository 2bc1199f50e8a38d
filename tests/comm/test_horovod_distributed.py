"""Horovod carries what torch.distributed carries, and ends in every state."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_embrace.comm.connect import Connection
from lightning_embrace.comm.control import RankFailedError
from lightning_embrace.comm.torch_backend import ExchangeError
from tests.support.ranks import Ranks

pytestmark = pytest.mark.horovod
MOVED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
SUMMED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)


def connect(backend: str = "horovod", timeout: float = 120.0) -> Connection:
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    connection = Connection(
        rank, world_size, torch.device("cpu"), backend, timedelta(seconds=timeout), os.environ["MASTER_ADDR"]
    )
    connection.open_groups()
    return connection


def exchange_everything(backend: str) -> tuple[list[Any], dict[str, Any]]:
    """Every operation with every dtype, uneven and empty pieces, several under way at once; and what was counted."""
    connection = connect(backend)
    comm = connection.communicator
    rank, n = comm.rank, comm.world_size
    handles = [comm.gather(torch.tensor([rank, 7 * rank]), "header")]
    for dtype in MOVED:
        send = (torch.arange(sum(range(n))) + 10 * rank).to(dtype)
        for low_priority in (False, True):
            handles.append(comm.all_to_all(send, list(range(n)), [rank] * n, "rows", "rows", low_priority))
        handles.append(comm.broadcast((torch.arange(5) + rank).to(dtype), "buffers", "buffers"))
    handles.append(comm.all_to_all(torch.empty(0), [0] * n, [0] * n, "rows", "no rows"))
    for dtype in SUMMED:
        handles.append(comm.all_reduce((torch.arange(6) + rank).to(dtype), "dense", "block", low_priority=rank >= 0))
    comm.give_way(30.0)
    results = [handle.wait() for handle in handles]
    assert all(handle.is_done() for handle in handles) and handles[0].wait() is results[0]
    dist.barrier()
    connection.close()
    return results, comm.traffic.sent


def test_it_carries_what_torch_carries(ranks: Callable[[int], Ranks]) -> None:
    """Every dtype and split, and the same bytes are counted; it starts a second time in the same processes."""
    for _ in range(2):
        theirs, ours = (ranks(3).run(exchange_everything, backend) for backend in ("gloo", "horovod"))
        for (expected, their_bytes), (got, our_bytes) in zip(theirs, ours):
            assert len(expected) == len(got)
            for a, b in zip(expected, got):
                torch.testing.assert_close(b, a, rtol=0, atol=0)
            bf16 = our_bytes.pop("dense") - their_bytes.pop("dense")  # it travels as fp32
            assert our_bytes == their_bytes and bf16 > 0


def in_another_order() -> list[float]:
    """Two threads issue on their own, as the queue and the training thread do."""
    connection = connect()
    comm = connection.communicator
    flats = [torch.full((1000,), float(k)) for k in range(20)]

    def later() -> None:
        for k, flat in enumerate(flats):
            if comm.rank == 0:
                time.sleep(0.003)  # so that the threads mix otherwise than on the other ranks
            comm.all_reduce(flat, "dense", f"block {k}", low_priority=True).wait()

    thread = threading.Thread(target=later)
    thread.start()
    for k in range(20):
        assert comm.gather(torch.tensor([k]), f"header {k}").wait().flatten().tolist() == [k] * comm.world_size
    thread.join()
    dist.barrier()
    connection.close()
    return [float(flat[0]) for flat in flats]


def test_the_order_between_urgent_and_low_priority_is_free(ranks: Callable[[int], Ranks]) -> None:
    """Each kind has one order; between the two every rank has its own, as timing has it."""
    assert ranks(2).run(in_another_order) == [[2.0 * k for k in range(20)]] * 2


def skip_an_exchange() -> str:
    connection = connect(timeout=3.0)
    comm = connection.communicator
    comm.gather(torch.tensor([1]), "header of step 0").wait()
    begun = time.monotonic()
    try:
        for step in (1, 2):
            comm.at_step(step)
            if comm.rank == 1 and step == 1:
                continue
            comm.all_to_all(
                torch.ones(comm.world_size), [1] * comm.world_size, [1] * comm.world_size, "rows", f"rows of {step}"
            ).wait()
    except (ExchangeError, RankFailedError) as error:
        connection.fail(error)
        with pytest.raises((ExchangeError, RankFailedError)):
            comm.gather(torch.tensor([1]), "after it")
        return f"{type(error).__name__}: {error}"
    finally:
        connection.abandon()
        assert time.monotonic() - begun < 60
    return "returned"


def test_a_rank_that_skips_an_exchange(ranks: Callable[[int], Ranks]) -> None:
    """Horovod itself would wait for ever. It ends on all ranks, the exchange is named, and none follows."""
    ends = ranks(3).run(skip_an_exchange)
    ranks(3).stop()  # their default group may be broken
    for end in ends:
        assert "rows of " in end and "step" in end, ends
    assert any("has not ended within 3 s, the `timeout`" in end for end in ends)


def ask_for_too_little() -> str:
    connection = connect()
    comm = connection.communicator
    expected = [1, 1] if comm.rank == 0 else [2, 1]
    try:
        comm.all_to_all(torch.ones(2), [1, 1], expected, "rows", "rows").wait()
    except ExchangeError as error:
        return str(error)
    finally:
        connection.abandon()
    return "returned"


def test_pieces_of_other_sizes_than_agreed(ranks: Callable[[int], Ranks]) -> None:
    """Horovod tells what came; a rank that expects something else does not take it for its rows."""
    ends = ranks(2).run(ask_for_too_little)
    ranks(2).stop()
    assert ends[0] == "returned" and "expected [2, 1] elements by rank, got [1, 1]" in ends[1]
