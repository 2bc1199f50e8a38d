"""Ranks with different data, each with Lightning's own fetcher and loaders, in threads: they stop together."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities import CombinedLoader

from lightning_embrace.lookahead.ahead import Lookahead, Pair
from lightning_embrace.lookahead.ends import agree_length
from lightning_embrace.lookahead.loader import length_of


class Meetings:
    """What ranks do together; one that does something else, or does not come, breaks it for all."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.said: list[Any] = [None] * world_size

    def gather(self, rank: int, kind: str, word: Any) -> list[Any]:
        self.said[rank] = (kind, word)
        self.barrier.wait()
        said = list(self.said)
        self.barrier.wait()
        assert {k for k, _ in said} == {kind}, f"the ranks do different things: {said}"
        return [w for _, w in said]


class Unsized:
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Sized(Unsized):
    def __len__(self) -> int:
        return self.count


class Rank:
    """Lightning's loop over the batches of an epoch, and the calls of a strategy."""

    def __init__(self, rank: int, meetings: Meetings, unequal: Any = "stop", ahead: bool = True) -> None:
        self.rank, self.meetings, self.ahead = rank, meetings, ahead
        self.warnings: list[str] = []
        self.batches: list[tuple[Any, bool]] = []
        self.pairs: list[Pair] = []
        self.asked = 0
        self.lookahead = Lookahead(self.ask, self.warnings.append, unequal)

    def ask(self, bit: bool) -> list[bool]:
        self.asked += 1
        return self.meetings.gather(self.rank, "ask", bit)

    def train(self, loaders: list[Any], mode: Any, epochs: int = 1) -> Rank:
        try:
            self.run(loaders, mode, epochs)
        except BaseException:
            self.meetings.barrier.abort()
            raise
        return self

    def run(self, loaders: list[Any], mode: Any, epochs: int = 1) -> None:
        wrapped = []
        for loader in loaders:
            lengths = self.meetings.gather(self.rank, "length", length_of(loader))
            wrapped.append(self.lookahead.process(loader, agree_length(lengths, True).length, ahead=self.ahead))
        combined = CombinedLoader(wrapped, mode)
        fetcher = _PrefetchDataFetcher()
        fetcher.setup(combined)
        for _ in range(epochs):
            iter(fetcher)
            # the loop asks for nothing when the length is 0
            while not (fetcher.length == 0 or (fetcher.length is not None and fetcher.done)):
                try:
                    batch, *_ = next(fetcher)
                except StopIteration:
                    break
                self.batches.append((batch, fetcher.done))
                self.pairs.append(self.lookahead.next_batch(combined.iterables))
                words = self.meetings.gather(self.rank, "step", self.lookahead.word())
                self.lookahead.hear(words)


def together(count: int, run: Callable[[Rank], Rank], **arguments: Any) -> list[Rank]:
    meetings = Meetings(count)
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, Rank(r, meetings, **arguments)) for r in range(count)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [f.result() for f in futures]


LOADERS = st.tuples(st.booleans(), st.lists(st.integers(0, 4), min_size=3, max_size=3))


@settings(deadline=None, max_examples=150)
@given(
    world_size=st.integers(1, 3),
    loaders=st.lists(LOADERS, min_size=1, max_size=3),
    mode=st.sampled_from(["min_size", "max_size", "max_size_cycle"]),
    epochs=st.integers(1, 2),
    ahead=st.booleans(),
)
def test_ranks_with_unequal_loaders_train_alike(world_size, loaders, mode, epochs, ahead):
    """Equal batches and `done` flags on all ranks, for any lengths, sized or not, in every combination; what is trained
    on is what the shortest loaders give in one process. A cycle over nothing has no batches to cycle through."""
    if mode == "max_size_cycle" and any(0 in counts[:world_size] for _, counts in loaders):
        return

    def run(rank: Rank) -> Rank:
        return rank.train([(Sized if s else Unsized)(counts[rank.rank]) for s, counts in loaders], mode, epochs)

    ranks = together(world_size, run, ahead=ahead)
    shortest = [(s, [min(counts[:world_size])] * 3) for s, counts in loaders]
    alone = Rank(0, Meetings(1), ahead=ahead)
    alone.train([(Sized if s else Unsized)(counts[0]) for s, counts in shortest], mode, epochs)
    for rank in ranks:
        assert rank.batches == alone.batches
        assert rank.asked == ranks[0].asked and rank.warnings == ranks[0].warnings
        assert [p.current for p in rank.pairs] == [b for b, _ in rank.batches]


@pytest.mark.parametrize("kind", [Sized, Unsized])
def test_the_pair_is_the_successor(kind):
    rank = Rank(0, Meetings(1)).train([kind(3)], "max_size_cycle", epochs=2)
    known = [([0], [1], True), ([1], [2], True), ([2], None, False)]
    assert rank.pairs == [([0], None, False), *known[1:], *known]


def test_a_single_loader_of_empty_batches_keeps_its_pairs():
    """Lightning calls no hook for a batch that is None."""
    lookahead = Lookahead(lambda bit: [bit], print)
    combined = CombinedLoader(lookahead.process([1, None, 2], 3), "max_size_cycle")
    for _ in range(2):
        fetched = [batch for batch, *_ in combined]
        pairs = [lookahead.next_batch(combined.iterables) for batch in fetched if batch is not None]
    assert pairs == [(1, None, True), (2, None, False)]


def test_a_batch_that_is_not_handed_out_is_no_successor():
    """Lightning asks for the batch after next before a step: where that is agreed to be none, its ids are not sent."""
    ranks = together(2, lambda rank: rank.train([Unsized([4, 3][rank.rank])], "min_size"))
    for rank in ranks:
        assert [p.known for p in rank.pairs] == [False, True, False]


def test_one_warning_names_the_ranks():
    ranks = together(3, lambda rank: rank.train([Unsized([3, 2, 4][rank.rank])], "min_size", epochs=3))
    assert [rank.warnings for rank in ranks] == [ranks[0].warnings] * 3
    (warning,) = ranks[0].warnings
    assert "rank 1 ended after 2 batches, ranks 0, 2 had more" in warning


def test_unequal_ends_raise_on_every_rank():
    raised = []

    def run(rank: Rank) -> Rank:
        with pytest.raises(RuntimeError, match="rank 1 ended after 2 batches, rank 0 had more"):
            rank.run([Unsized([3, 2][rank.rank])], "min_size")
        raised.append(rank.rank)
        return rank

    together(2, run, unequal="raise")
    assert sorted(raised) == [0, 1]


def test_headers_tell_what_would_have_to_be_asked():
    """Only the batches that Lightning fetches before the first step are asked for."""
    rank = Rank(0, Meetings(1)).train([Unsized(5)], "min_size")
    assert rank.asked == 3  # and once whether it draws random numbers
    assert Rank(0, Meetings(1)).train([Unsized(5)], "min_size", epochs=3).asked == 3 + 2 * 2
    assert Rank(0, Meetings(1)).train([Sized(5)], "min_size", epochs=3).asked == 0


class Drawing(Unsized):
    """Draws a seed at first, and random numbers for every batch on rank 1."""

    def __init__(self, count: int, rank: int) -> None:
        super().__init__(count)
        self.rank, self.fetched = rank, 0

    def __iter__(self) -> Iterator[int]:
        with LOCK:
            torch.rand(1)
        for i in range(self.count):
            self.fetched += 1
            if self.rank == 1:
                random.random()
            yield i


LOCK = threading.Lock()


def test_no_rank_fetches_ahead_where_one_draws_random_numbers():
    """Lightning holds a batch itself, and asks for it at the same place on every rank."""

    def run(rank: Rank) -> Rank:
        loader = Drawing(4, rank.rank)
        wrapped = rank.lookahead.process(loader)
        batches = iter(CombinedLoader(wrapped, "min_size"))
        for number in range(1, 4):
            next(batches)
            rank.meetings.gather(rank.rank, "step", 0)
            assert loader.fetched == number
        return rank

    for rank in together(2, run):
        (warning,) = rank.warnings
        assert "draws random numbers in the training process" in warning
