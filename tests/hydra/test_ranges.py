"""Parts of a file that are handed out and taken back."""

from __future__ import annotations

import random

from lightning_embrace.hydra.ranges import Ranges


def test_gaps_are_filled_and_the_end_is_given_back() -> None:
    ranges = Ranges()
    first, second, third = (ranges.take(n) for n in (10, 20, 30))
    assert (first, second, third, ranges.end) == (0, 10, 30, 60)
    ranges.give(first, 10)
    ranges.give(second, 20)
    assert ranges.take(25) == 0 and ranges.end == 60
    ranges.give(third, 30)
    assert ranges.end == 25, "what lay before the last part is given back with it"
    assert ranges.take(5) == 25


def test_parts_never_overlap() -> None:
    """Whatever is taken and given back, in whatever order; and nothing is left over."""
    numbers, ranges = random.Random(0), Ranges()
    used: dict[int, int] = {}
    for _ in range(2000):
        if used and numbers.random() < 0.5:
            start = numbers.choice(list(used))
            ranges.give(start, used.pop(start))
        else:
            length = numbers.randint(1, 9)
            start = ranges.take(length)
            assert all(start + length <= s or s + n <= start for s, n in used.items())
            used[start] = length
        assert ranges.end == max((s + n for s, n in used.items()), default=0)
