"""Which tensors cover which look-ups is learned from few steps, and never a wrong promise of a kind that costs rows."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_embrace.lookahead.cover import Cover, _Step, smallest_cover

ROWS = 100


def random_ids(count: int, seed: int, rows: int = ROWS) -> Tensor:
    return torch.randint(rows, (count,), generator=torch.Generator().manual_seed(seed))


def learned(batches: list[Any], looked_up: list[dict[int, Tensor]], tables: int = 1) -> Cover:
    cover = Cover([ROWS] * tables)
    for batch, ids in zip(batches, looked_up):
        cover.note(batch)
        cover.observe({t: torch.unique(i) for t, i in ids.items()})
    return cover


def steps(count: int = 2, **sizes: int) -> list[dict[str, Tensor]]:
    return [{name: random_ids(size, 100 * s + n) for n, (name, size) in enumerate(sizes.items())} for s in range(count)]


def test_two_steps_teach_each_table_its_tensors():
    batches = steps(user=5, item=8, label=8)
    cover = learned(batches, [{0: b["user"], 1: b["item"]} for b in batches], tables=2)
    assert cover.paths == [("['user']",), ("['item']",)]
    assert not cover.learning
    (batch,) = steps(1, user=6, item=6)
    assert cover.ids(batch)[0].equal(torch.unique(batch["user"]))


def test_one_step_is_not_enough():
    batches = steps(1, user=5)
    cover = learned(batches, [{0: batches[0]["user"]}])
    assert cover.learning and cover.ids(batches[0]) == {0: None}


def test_a_table_may_need_several_tensors():
    """Targets and negatives are looked up in one table; what is covered already needs no tensor of its own."""
    batches = steps(noise=20, target=5, negative=9)
    looked_up = [{0: torch.cat([b["target"], b["negative"]])} for b in batches]
    assert learned(batches, looked_up).paths == [("['target']", "['negative']")]


def test_a_tensor_that_others_make_needless_is_left_out():
    """It has the most ids and is chosen first."""
    batches = [{"most": torch.arange(1, 5), "low": torch.arange(3), "high": torch.arange(3, 6)}] * 2
    assert learned(batches, [{0: torch.arange(6)}] * 2).paths == [("['low']", "['high']")]


def test_a_part_of_a_tensor_is_covered_by_the_whole():
    """Language models look up all but the last token."""
    batches = [{"tokens": random_ids(21, s).view(3, 7)} for s in range(2)]
    assert learned(batches, [{0: b["tokens"][:, :-1]} for b in batches]).paths == [("['tokens']",)]


def test_of_equals_the_one_with_less_besides_is_taken():
    batches = steps(exact=6)
    batches = [{"more": torch.cat([b["exact"], random_ids(9, 7)]), "exact": b["exact"]} for b in batches]
    assert learned(batches, [{0: b["exact"]} for b in batches]).paths == [("['exact']",)]


def test_a_coincidence_of_one_step_is_not_learned():
    """The look-ups of the first step happen to be in another tensor as well."""
    batches = steps(3, ids=4)
    batches[0] = {"lucky": batches[0]["ids"], "ids": batches[0]["ids"]}
    batches[1:] = [{"lucky": torch.tensor([99]), "ids": b["ids"]} for b in batches[1:]]
    assert learned(batches, [{0: b["ids"]} for b in batches]).paths == [("['ids']",)]


def test_changed_ids_are_not_learned():
    """Offsets and hashes: the table stays unknown, and costs nothing after a few steps."""
    batches = steps(8, ids=30)
    cover = learned(batches, [{0: (b["ids"] + 31) % ROWS} for b in batches])
    assert not cover.learning and cover.known == [False]
    assert cover.ids(batches[0]) == {0: None}


def test_a_cover_with_far_too_many_ids_is_refused():
    """Small ids happen to be in any long text: their rows would be fetched in every step for nothing."""
    batches = [{"text": torch.arange(60)} for _ in range(5)]
    cover = learned(batches, [{0: torch.tensor([1, 2])} for _ in batches])
    assert cover.known == [False]


def test_steps_without_look_ups_teach_nothing():
    batches = steps(5, ids=4)
    looked_up = [{0: b["ids"]} if s in (1, 4) else ({} if s else {0: b["ids"][:0]}) for s, b in enumerate(batches)]
    assert learned(batches, looked_up).paths == [("['ids']",)]


def test_the_training_step_may_change_the_batch():
    cover = Cover([ROWS])
    for batch in steps(ids=4):
        cover.note(batch)
        ids = torch.unique(batch["ids"])
        batch.pop("ids").zero_()
        cover.observe({0: ids})
    assert cover.known == [True]


def test_padding_is_dropped_and_a_missing_tensor_is_unknown():
    batches = steps(ids=4)
    cover = learned(batches, [{0: b["ids"]} for b in batches])
    ids = cover.ids({"ids": torch.tensor([[7, -100], [ROWS, 7], [0, 3]], dtype=torch.int32)})[0]
    assert ids.tolist() == [0, 3, 7] and ids.dtype == torch.int64
    assert cover.ids({"other": torch.tensor([1])}) == {0: None}
    assert cover.ids(None) == {0: None}
    assert cover.ids({"ids": torch.tensor([], dtype=torch.int64)})[0].tolist() == []


def test_misses_in_a_row_are_learned_anew():
    batches = steps(old=4, new=4)
    cover = learned(batches, [{0: b["old"]} for b in batches])
    for foreseen in (False, False, True, False, False):
        cover.checked(0, foreseen)
    assert cover.known == [True]
    cover.checked(0, False)
    assert cover.known == [False] and cover.learning
    for batch in batches:
        cover.note(batch)
        cover.observe({0: torch.unique(batch["new"])})
    assert cover.paths == [("['new']",)]


def test_learning_ends_some_time():
    batches = steps(ids=4)
    cover = learned(batches, [{0: b["ids"]} for b in batches])
    lessons = 0
    while cover.learning or cover.known[0]:
        lessons += 1
        for batch in batches:
            cover.note(batch)
            cover.observe({0: torch.unique(batch["ids"])})
        for _ in range(3):
            cover.checked(0, False)
    assert lessons == 3


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True),
            st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(-2, 12), max_size=8)),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_a_cover_covers(observed):
    """Whatever was observed: the union has every look-up of every step, no chosen tensor is needless, and where nothing
    is chosen all tensors together do not cover, or have far too many ids."""
    said = []
    for wanted, tensors in observed:
        covered = {n: torch.tensor([w in ids for w in wanted]) for n, ids in tensors.items()}
        besides = {n: len(set(range(10)) & set(ids) - set(wanted)) for n, ids in tensors.items()}
        said.append(_Step(len(wanted), covered, besides))
    cover = smallest_cover(said)

    def covers(names: Any) -> bool:
        return all(set(wanted) <= {i for n in names for i in tensors.get(n, [])} for wanted, tensors in observed)

    if cover is None:
        total = sum(step.looked_up for step in said)
        assert not covers("abcd") or sum(b for step in said for b in step.besides.values()) > 3 * total
    else:
        assert covers(cover)
        assert not any(covers([n for n in cover if n != name]) for name in cover if len(cover) > 1)
