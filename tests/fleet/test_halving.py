"""Who goes on at a rung."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest

from lightning_embrace import SuccessiveHalving
from lightning_embrace.fleet.halving import Runner, verdicts

Given = tuple[list[float], Literal["runs", "paused", "failed", "ended"]]


def decided(halving: SuccessiveHalving, **runners: Given) -> str:
    """Those who go on, a hyphen, those who do not."""
    found = verdicts(halving, {name: Runner(*runner) for name, runner in runners.items()})
    on, out = ("".join(name for name, v in found.items() if v.goes_on is wanted) for wanted in (True, False))
    return f"{on}-{out}"


HALF = SuccessiveHalving("val_loss", 1)


def test_best_half() -> None:
    """The best go on, by either mode, and the share is rounded down."""
    four: dict[str, Given] = {
        "a": ([3.0], "paused"),
        "b": ([1.0], "paused"),
        "c": ([4.0], "paused"),
        "d": ([2.0], "paused"),
    }
    assert decided(HALF, **four) == "bd-ac"
    assert decided(SuccessiveHalving("acc", 1, mode="max"), **four) == "ca-db"
    assert decided(SuccessiveHalving("val_loss", 1, keep=0.74), **four) == "bd-ac"
    assert decided(SuccessiveHalving("val_loss", 1, keep=0.1), **four) == "b-dac"
    assert [SuccessiveHalving("x", 1, keep=0.29).places(n) for n in (1, 2, 10, 100)] == [1, 1, 2, 29]


def test_ties() -> None:
    """Are for the first of the tasks; their order does not depend on who came first."""
    assert decided(HALF, a=([1.0], "paused"), b=([1.0], "paused"), c=([1.0], "paused")) == "a-bc"


def test_no_numbers() -> None:
    """Are worse than infinity, in either mode."""
    for mode in ("min", "max"):
        halving = SuccessiveHalving("x", 1, mode=mode)
        assert decided(halving, a=([math.nan], "paused"), b=([math.inf], "paused")) == "b-a"
        assert decided(halving, a=([math.nan], "paused"), b=([-math.inf], "paused")) == "b-a"
    assert decided(HALF, a=([math.nan], "paused"), b=([math.nan], "paused")) == "a-b"


def test_waits_for_all_that_may_come() -> None:
    """Nobody is judged while another may reach the same rung; who has failed or ended does not come."""
    assert decided(HALF, a=([1.0], "paused"), b=([], "runs")) == "-"
    assert decided(HALF, a=([1.0], "runs"), b=([], "runs")) == "-"
    # it has passed this rung already
    assert decided(HALF, a=([1.0], "paused"), b=([2.0], "runs")) == "a-"
    # failed: counts as the worst of three, so that one goes on; of two it would be one as well
    three = SuccessiveHalving("x", 1, keep=0.67)
    assert decided(three, a=([1.0], "paused"), b=([2.0], "paused"), c=([], "failed")) == "ab-"
    # finished before: does not count, and takes nobody's place
    assert decided(three, a=([1.0], "paused"), b=([2.0], "paused"), c=([], "ended")) == "a-b"


def test_later_rungs() -> None:
    """Only those who have come that far are compared, by what they have logged there."""
    assert decided(HALF, a=([1.0, 9.0], "paused"), b=([2.0, 8.0], "paused"), c=([0.5], "ended")) == "b-a"


def test_comes_late() -> None:
    """A task that had failed is held against all that have been there, and is waited for at the next rung."""
    others: dict[str, Given] = {
        "a": ([1.0, 5.0], "paused"),
        "b": ([2.0, 6.0], "paused"),
        "c": ([3.0], "ended"),
        "d": ([4.0], "ended"),
    }
    assert decided(HALF, **others, late=([], "runs")) == "-"
    assert decided(HALF, **others, late=([1.5], "paused")) == "late-"
    assert decided(HALF, **others, late=([2.5], "paused")) == "-late"
    assert decided(HALF, **others, late=([1.5], "runs")) == "-"
    assert decided(HALF, **others, late=([1.5, 4.0], "paused")) == "late-ab"


def test_says_why() -> None:
    """A task that ends is told where, as what, and how many went on."""
    found = verdicts(SuccessiveHalving("acc", "200 steps", mode="max"), {
        "a": Runner([0.1, 0.12345], "paused"),
        "b": Runner([0.2, 0.2], "paused"),
    })  # fmt: skip
    assert not found["a"].goes_on
    assert found["a"].why == "successive halving: number 2 of 2 at step 400, acc 0.1235, and 1 went on"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"every": 0}, r"every=0\): give epochs, a whole number from 1 on, or steps, as in '200 steps'"),
        ({"every": "a while"}, "every='a while'"),
        ({"every": True}, "every=True"),
        ({"every": 1, "keep": 1.0}, r"keep=1.0\): give a share between 0 and 1"),
        ({"every": 1, "mode": "best"}, r"mode='best'\): allowed are 'min', 'max'"),
    ],
    ids=str,
)
def test_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SuccessiveHalving("val_loss", **arguments)


def test_rungs() -> None:
    """Every so many epochs or steps."""
    assert (SuccessiveHalving("x", 3).unit, SuccessiveHalving("x", 3).rung(2)) == ("epochs", 6)
    assert (SuccessiveHalving("x", "1 step").unit, SuccessiveHalving("x", "20 steps").rung(2)) == ("steps", 40)
