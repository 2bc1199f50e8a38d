"""The three values of `lookahead=`."""

from __future__ import annotations

import pytest
import torch

from lightning_embrace.lookahead.source import make_source

BATCH = {"ids": torch.tensor([5, 2, 2, -100, 50])}


def test_a_function_tells_the_ids():
    source = make_source(lambda batch: {"words": batch["ids"].int()}, ["words", "places"], [10, 10])
    ids = source.ids(BATCH)
    assert ids[0].tolist() == [2, 5] and ids[0].dtype == torch.int64
    assert ids[1] is None
    assert source.known == [True, True] and not source.learning


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"wrods": BATCH["ids"]}, r"ids of 'wrods', which is no sharded table.*names are: 'words'\."),
        ({"words": torch.rand(2)}, r"for 'words' it returned torch\.float32, expected is .*'words'"),
        ({"words": [1, 2]}, r"for 'words' it returned list, expected is"),
        (BATCH["ids"], r"it returned Tensor, expected is a dictionary"),
    ],
)
def test_a_function_that_returns_something_else_is_told_what_is_expected(told, message):
    with pytest.raises(ValueError, match=message):
        make_source(lambda batch: told, ["words"], [10]).ids(BATCH)


def test_off_knows_nothing():
    source = make_source("off", ["words"], [10])
    source.note(BATCH)
    source.observe({0: BATCH["ids"]})
    source.checked(0, False)
    source.unlearn(0)
    assert source.ids(BATCH) == {0: None} and source.known == [False] and not source.learning


def test_auto_learns():
    assert make_source("auto", ["words"], [10]).learning


@pytest.mark.parametrize("wrong", ["on", None, 3])
def test_anything_else_is_refused(wrong):
    with pytest.raises(ValueError, match=r"allowed are 'auto', 'off' and a function"):
        make_source(wrong, ["words"], [10])
