"""The lease book: who gets a device when, and that nobody ever shares one."""

from __future__ import annotations

import math

import pytest

from lightning_embrace.fleet.lease import Grant, Lease, LeaseBook, Recall


def book_of(policy: str, devices: int, *remaining: float, max_wait: float | None = None) -> LeaseBook:
    """Tasks a, b, c … that all ask at 0, with shards of 1 s."""
    book = LeaseBook([f"d{i}" for i in range(devices)], policy, max_wait=max_wait)
    for name, seconds in zip("abcdefgh", remaining):
        book.join(name, seconds, 1.0, now=0.0)
        book.ask(name, 0.0)
    return book


def test_the_longest_go_first_and_are_given_way_to() -> None:
    """lrtf: a is the shortest and waits; c is given way to by b, which has less left at its next boundary."""
    book = book_of("lrtf", 1, 3.0, 5.0, 4.5)
    assert book.due(0.0) == [Grant("b", "d0"), Recall("b", "d0")]
    assert book.due(0.5) == []
    book.report("b", 4.0, 1.0, 1.0)
    book.give("b", 1.0)
    book.ask("b", 1.0)
    assert book.due(1.0) == [Grant("c", "d0"), Recall("c", "d0")]
    assert book.leases == [Lease("b", "d0", 0.0, 1.0)]


def test_a_longer_task_gives_way_only_when_it_has_less_left() -> None:
    """At its next boundary a has 2 left, and b more. How far a is follows from the time until it reports."""
    book = book_of("lrtf", 1, 5.0, 2.5)
    assert book.due(0.0) == [Grant("a", "d0")]
    assert book.due(1.9) == []
    assert book.due(2.0) == [Recall("a", "d0")]


def test_a_task_alone_is_never_recalled() -> None:
    book = book_of("fifo", 2, 3.0, 3.0)
    assert book.due(0.0) == [Grant("a", "d0"), Grant("b", "d1")]
    assert book.due(1.0) == []


def test_no_more_are_recalled_than_wait() -> None:
    """Also when some were recalled before, who have not given yet."""
    book = book_of("fifo", 3, 3.0, 3.0, 3.0, 3.0)
    assert book.due(0.0)[3:] == [Recall("a", "d0")]
    book.join("e", 3.0, 1.0, now=0.5)
    book.ask("e", 0.5)
    assert book.due(0.5) == [Recall("b", "d1")]


def test_who_has_had_its_device_longest_gives_way_first() -> None:
    """fifo: a was granted anew, and so it is b's turn to give."""
    book = book_of("fifo", 2, 3.0, 3.0)
    book.due(0.0)
    book.give("a", 1.0)
    book.ask("a", 1.0)
    assert book.due(1.0) == [Grant("a", "d0")]
    book.join("c", 3.0, 1.0, now=2.0)
    book.ask("c", 2.0)
    assert book.due(2.0) == [Recall("b", "d1")]


def test_equal_ones_do_not_swap() -> None:
    """At its next boundary a has as much left as b: to swap gains nothing."""
    book = book_of("lrtf", 1, 3.0, 2.0)
    assert book.due(0.0) == [Grant("a", "d0")]


def test_waiting_is_not_computing() -> None:
    """b has waited for 4 s when it is granted d0; 5 s are still left to it."""
    book = book_of("lrtf", 1, 9.0, 5.0)
    assert book.due(0.0) == [Grant("a", "d0")]
    assert book.due(4.0) == [Recall("a", "d0")]
    book.leave("a", 4.0)
    book.join("c", 3.5, 1.0, now=4.0)
    book.ask("c", 4.0)
    assert book.due(4.0) == [Grant("b", "d0")]


def test_random_lets_everybody_go_first() -> None:
    first = set()
    for seed in range(30):
        book = LeaseBook(["d0"], "random", seed=seed)
        for task in ("a", "b", "c"):
            book.join(task, 1.0, 1.0, now=0.0)
            book.ask(task, 0.0)
        first.add(book.due(0.0)[0].task)
    assert first == {"a", "b", "c"}


def test_whole_models_never_give_way() -> None:
    """task: neither to a longer one nor to one that has waited for too long."""
    book = book_of("task", 1, 3.0, 2.0, max_wait=1.0)
    assert book.due(0.0) == [Grant("a", "d0")]
    book.join("c", math.inf, 1.0, now=1.0)
    book.ask("c", 1.0)
    assert book.due(100.0) == []


def test_unknown_lengths_count_as_longest_and_take_turns() -> None:
    book = book_of("lrtf", 1, 3.0, math.inf, math.inf)
    assert book.due(0.0) == [Grant("b", "d0"), Recall("b", "d0")]
    book.give("b", 1.0)
    book.ask("b", 1.0)
    assert book.due(1.0) == [Grant("c", "d0"), Recall("c", "d0")]


def test_who_has_waited_for_too_long_goes_first() -> None:
    book = book_of("lrtf", 1, 9.0, 1.0, max_wait=2.0)
    assert book.due(1.9) == [Grant("a", "d0")]
    assert book.due(2.0) == [Recall("a", "d0")]
    book.give("a", 3.0)
    book.ask("a", 3.0)
    assert book.due(3.0) == [Grant("b", "d0"), Recall("b", "d0")]


def test_a_task_returns_to_its_device() -> None:
    """Of two free devices each takes its own; and of equal tasks the one that was there goes first."""
    book = LeaseBook(["d0", "d1"], "lrtf")
    for task, device in (("a", "d1"), ("b", "d0")):
        book.join(task, 4.0, 1.0, device, now=0.0)
        book.ask(task, 0.0)
    assert set(book.due(0.0)) == {Grant("a", "d1"), Grant("b", "d0")}
    book = book_of("lrtf", 1, 4.0, 4.0)
    book.due(0.0)
    book.give("a", 1.0)
    book.ask("a", 1.0)
    assert book.due(1.0)[0] == Grant("a", "d0")


def test_what_does_not_move_keeps_to_its_seat() -> None:
    """d1 is free, and b waits for d0 all the same."""
    book = LeaseBook(["d0", "d1"], "lrtf", movable=False)
    for task in ("a", "b"):
        book.join(task, 4.0, 1.0, "d0", now=0.0)
        book.ask(task, 0.0)
    assert book.due(0.0) == [Grant("a", "d0"), Recall("a", "d0")]


def test_leaving_frees_the_device_and_the_place_in_the_queue() -> None:
    book = book_of("task", 1, 3.0, 2.0, 1.0)
    book.due(0.0)
    book.leave("a", 1.0)
    book.leave("b", 1.0)
    assert book.due(1.0) == [Grant("c", "d0")]
    assert book.holders == {"d0": "c"}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda book: book.ask("a", 1.0), "has d0"),
        (lambda book: book.ask("b", 1.0), "waits already"),
        (lambda book: book.give("b", 1.0), "no device"),
        (lambda book: book.leave("z", 1.0), "no task 'z'"),
        (lambda book: book.join("a", 1.0, 1.0, now=1.0), "joined already"),
        (lambda book: book.join("z", 1.0, 1.0, "d7", now=1.0), "expected one of d0"),
        (lambda book: LeaseBook(["d0"], "lifo"), "'lrtf', 'fifo', 'random', 'task'"),
        (lambda book: LeaseBook([], "lrtf"), "one or more"),
        (lambda book: LeaseBook(["d0"], "lrtf", movable=False).join("a", 1.0, 1.0, now=0.0), "device=None"),
    ],
)
def test_what_cannot_have_happened_is_an_error(wrong: object, says: str) -> None:
    """Who sends it is named, before the book says anything untrue."""
    book = book_of("task", 1, 3.0, 2.0)
    book.due(0.0)
    with pytest.raises(ValueError, match=says):
        wrong(book)  # type: ignore[operator]
