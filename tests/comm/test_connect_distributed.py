"""Ranks that are lost before, between and after the steps in which a connection is made."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_embrace.comm.breaking import break_group
from lightning_embrace.comm.connect import Connection
from lightning_embrace.comm.control import RankFailedError
from tests.faults.world import World

N = 3
#: longer than a failing test waits: nothing here may end by a timeout
TIMEOUT = timedelta(seconds=900)


def rank_and_group() -> int:
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]), timeout=TIMEOUT)
    dist.barrier()
    return rank


def connect(rank: int) -> Connection:
    return Connection(rank, dist.get_world_size(), torch.device("cpu"), "gloo", TIMEOUT, "127.0.0.1")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lost_before(lost: int) -> None:
    rank = rank_and_group()
    if rank == lost:
        die()
    connect(rank)


def lost_between(lost: int) -> None:
    rank = rank_and_group()
    connection = connect(rank)
    if rank == lost:
        die()
    connection.open_groups()


def failed_between(lost: int) -> None:
    """It raises, says so and lives on: no connection closes."""
    rank = rank_and_group()
    connection = connect(rank)
    if rank == lost:
        connection.fail(ValueError("boom"))
        time.sleep(3600)
    connection.open_groups()


def leaves_work_behind() -> None:
    """Rank 0 ends in the middle of exchanges that nobody else has begun, or will."""
    rank = rank_and_group()
    connection = connect(rank)
    connection.open_groups()
    if rank > 0:
        time.sleep(3600)
    flat = torch.ones(1000)
    handles = [connection.communicator.all_reduce(flat, "dense", f"block {k}") for k in range(3)]
    handles.append(connection.communicator.all_to_all(torch.ones(N), [1] * N, [1] * N, "rows", "rows"))
    connection.fail(ValueError("boom"))
    connection.abandon()


def blocked_on_the_default_group() -> None:
    """Rank 1 fails and lives on, while the others wait in a collective that is none of ours."""
    rank = rank_and_group()
    connection = connect(rank)
    if rank == 1:
        connection.fail(ValueError("boom"))
        time.sleep(3600)
    try:
        dist.broadcast(torch.zeros(1), src=1)
    except RuntimeError as error:
        connection.fail(error)
        raise


def broken_group() -> None:
    """What is under way ends, what is begun later ends too; a group that is gone does no harm."""
    rank = rank_and_group()
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    gone = dist.new_group(backend="gloo", timeout=TIMEOUT)
    dist.destroy_process_group(gone)
    if rank > 0:
        time.sleep(3600)
    works = [dist.all_reduce(torch.ones(1000), group=group, async_op=True), dist.irecv(torch.ones(1), 2, group)]
    break_group(group)
    break_group(gone)
    works.append(dist.all_reduce(torch.ones(1000), group=group, async_op=True))
    for work in works:
        with pytest.raises(RuntimeError):
            work.wait()
    dist.all_reduce(torch.ones(1), group=dist.new_group([0]))  # another group works on


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def start(function: Callable[..., None], *arguments: int) -> World:
        worlds.append(World(tmp_path, N, functools.partial(function, *arguments)))
        return worlds[-1]

    yield start
    for world in worlds:
        world.clear()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_dies_before_it_joins(start: Callable[..., World], lost: int) -> None:
    """Nobody watches it yet; its closed connections are what tells."""
    for end in start(lost_before, lost).ends([r for r in range(N) if r != lost]):
        assert end.code == 1, end.output
        assert "The exchange 'joining' failed" in end.last_line or "control channel" in end.last_line, end.output


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_dies_before_groups_are_made(start: Callable[..., World], lost: int) -> None:
    """A new group would wait for it until the timeout: it has no connections that could close."""
    for end in start(lost_between, lost).ends([r for r in range(N) if r != lost]):
        assert end.code == 1, end.output
        assert f"{RankFailedError.__name__}: rank {lost} died" in end.last_line, end.output


@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_fails_before_groups_are_made(start: Callable[..., World], lost: int) -> None:
    """Not even a connection closes when its process lives on."""
    for end in start(failed_between, lost).ends([r for r in range(N) if r != lost]):
        assert end.code == 1, end.output
        assert f"{RankFailedError.__name__}: rank {lost} failed" in end.last_line, end.output


def test_a_process_ends_though_exchanges_are_under_way(start: Callable[..., World]) -> None:
    """At its end a process waits for what it has begun: for as long as the timeout, once."""
    (end,) = start(leaves_work_behind).ends([0])
    assert (end.code, end.last_line) == (0, "returned"), end.output


def test_a_collective_of_others_is_broken(start: Callable[..., World]) -> None:
    """torchmetrics and Lightning call torch.distributed themselves; the error gets a note that names the rank."""
    for end in start(blocked_on_the_default_group).ends([0, 2]):
        assert end.code == 1, end.output
        assert "RuntimeError: " in end.output
        assert end.last_line.startswith("[lightning_embrace] rank 1 failed ") or not hasattr(
            BaseException, "add_note"
        ), end.output


def test_break_group(start: Callable[..., World]) -> None:
    """On one rank, with the others alive and silent."""
    (end,) = start(broken_group).ends([0])
    assert (end.code, end.last_line) == (0, "returned"), end.output
