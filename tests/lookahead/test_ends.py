"""Ranks with different numbers of batches stop together, and none asks when another does not."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_embrace.lookahead.ends import Ends, agree_length, describe_unequal

Meeting = tuple[str, bool]


class Rank:
    """One rank's loader and Lightning's loop over it, as a generator of what it does together with the others."""

    def __init__(self, count: int, prefetch: int, epochs: int, without_step: Sequence[int]) -> None:
        self.count, self.prefetch, self.epochs, self.without_step = count, prefetch, epochs, without_step
        self.trained: list[tuple[int, int, bool]] = []  # epoch, batch, Lightning's `done`
        self.unequal: list[tuple[list[int], list[int], int]] = []

    def run(self) -> Generator[Meeting, list[bool], None]:
        for epoch in range(self.epochs):
            self.ends, self.delivered = Ends(), 0
            self.ends.hold(self.count > 0)
            fetched = []
            over = False
            for _ in range(self.prefetch):
                over = not (yield from self.ask())
                fetched += [] if over else [self.delivered - 1]
            while True:
                if self.prefetch:
                    if not fetched:
                        break
                    batch = fetched.pop(0)
                    if not over:
                        over = not (yield from self.ask())
                        fetched += [] if over else [self.delivered - 1]
                else:
                    if not (yield from self.ask()):
                        break
                    batch = self.delivered - 1
                if batch not in self.without_step:
                    self.ends.hear((yield "step", self.ends.exists))
                self.trained.append((epoch, batch, over))

    def ask(self) -> Generator[Meeting, list[bool], bool]:
        """What the wrapper does when it is asked for a batch: `Lookahead.agreed` and `Iteration.__next__`."""
        if not self.ends.settled:
            self.ends.hear((yield "ask", self.ends.exists))
        if self.ends.unequal is not None:
            self.unequal.append((*self.ends.unequal, self.delivered))
        if not self.ends.verdict:
            return False
        assert self.delivered < self.count, "a batch is handed out that does not exist"
        self.delivered += 1
        self.ends.hold(self.delivered < self.count)
        return True


def together(ranks: list[Rank]) -> int:
    """Runs the ranks in lockstep; whatever they do, all do the same. Returns how often they asked directly."""
    runs = [rank.run() for rank in ranks]
    asked = 0
    said: list[Meeting | None] = [next(run, None) for run in runs]
    while any(s is not None for s in said):
        assert all(s is not None for s in said), f"some ranks have ended: {said}"
        assert len({s[0] for s in said}) == 1, f"the ranks do different things: {said}"
        asked += said[0][0] == "ask"
        bits = [s[1] for s in said]
        said = [_send(run, bits) for run in runs]
    return asked


def _send(run: Generator[Meeting, list[bool], None], bits: list[bool]) -> Meeting | None:
    try:
        return run.send(bits)
    except StopIteration:
        return None


@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    prefetch=st.sampled_from([0, 1]),
    epochs=st.integers(1, 2),
    without_step=st.lists(st.integers(0, 6), max_size=2),
)
def test_all_stop_at_the_shortest(counts, prefetch, epochs, without_step):
    """Same batches, same `done` flags on every rank; with Lightning's own prefetching and without; also where a batch
    has no step, so that no header tells anything."""
    ranks = [Rank(n, prefetch, epochs, without_step) for n in counts]
    together(ranks)
    shortest = min(counts)
    for rank in ranks:
        assert [(e, b) for e, b, _ in rank.trained] == [(e, b) for e in range(epochs) for b in range(shortest)]
        if prefetch:
            assert [done for *_, done in rank.trained] == [b == shortest - 1 for _, b, _ in rank.trained]
        assert rank.unequal == ranks[0].unequal


@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=4), prefetch=st.sampled_from([0, 1]))
def test_the_direct_question_is_rare(counts, prefetch):
    """Headers that exist anyway carry the bit: only what is fetched before the first step is asked for."""
    ranks = [Rank(n, prefetch, 1, ()) for n in counts]
    assert together(ranks) <= 1 + prefetch


@given(counts=st.lists(st.integers(0, 6), min_size=2, max_size=4), prefetch=st.sampled_from([0, 1]))
def test_unequal_ends_name_the_ranks(counts, prefetch):
    ranks = [Rank(n, prefetch, 1, ()) for n in counts]
    together(ranks)
    shortest = min(counts)
    more = [r for r, n in enumerate(counts) if n > shortest]
    fewer = [r for r, n in enumerate(counts) if n == shortest]
    assert ranks[0].unequal == ([(more, fewer, shortest)] if more else [])


def test_describes_the_ranks():
    text = describe_unequal([0, 2], [1], 5)
    assert "rank 1 ended after 5 batches, ranks 0, 2 had more" in text


@pytest.mark.parametrize(
    ("lengths", "length", "said"),
    [
        ([4, 4], 4, None),
        ([None, None], None, None),
        ([4, 3, 3], 3, "between 3 (ranks 1, 2) and 4"),
        ([4, None], None, "none on rank 1"),
        ([0, 0], 0, None),
    ],
)
def test_agrees_on_the_smallest_length(lengths, length, said):
    """A loader that has a length on some ranks only has none: Lightning's own check would wait for the others."""
    agreed = agree_length(lengths)
    assert agreed.length == length
    assert (agreed.warning is None) == (said is None)
    assert said is None or said in agreed.warning


def test_an_empty_rank_is_an_error_unless_the_model_allows_it():
    with pytest.raises(ValueError, match=r"of rank 1 is empty, others have up to 4"):
        agree_length([4, 0])
    assert agree_length([4, 0], allow_empty=True).length == 0
