"""Loaders of a user's loop: one batch ahead, and otherwise what they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_embrace.fabric.batches import Batches
from lightning_embrace.lookahead.ahead import Pair


def make() -> tuple[Batches, list[str]]:
    """Nothing handed out yet, and what it warns of."""
    warned: list[str] = []
    return Batches(warned.append), warned


def loader(items: Any) -> DataLoader[Any]:
    """One batch for each item."""
    return DataLoader(list(items), batch_size=None, shuffle=False)


def test_a_batch_and_its_successor() -> None:
    """From the second batch on: before it, nobody knows whether the loader draws random numbers."""
    batches, warned = make()
    seen = [(batch, batches.take()) for batch in batches.wrap(loader([1, 2, 3, 4]))]
    assert [batch for batch, _ in seen] == [1, 2, 3, 4]
    assert [pair for _, pair in seen] == [Pair(1, None), Pair(2, 3, True), Pair(3, 4, True), Pair(4, None)]
    assert warned == []


def test_two_loaders_at_once() -> None:
    """A tuple of those that were handed out since the last forward pass, in the order in which they were set up."""
    batches, _ = make()
    first, second = batches.wrap(loader([1, 2, 3])), batches.wrap(loader([10, 20, 30]))
    pairs = [batches.take() for _ in zip(second, first)]
    assert pairs[1] == Pair((2, 20), (3, 30), True)
    for _ in first:
        alone = batches.take()
    assert alone == Pair(3, None)


def test_what_was_handed_out_is_told_once() -> None:
    """A second forward pass with the same batch tells nothing."""
    batches, _ = make()
    for _ in batches.wrap(loader([1, 2, 3])):
        batches.take()
        assert batches.take() == Pair()


def test_iterations_do_not_disturb_each_other() -> None:
    """A loop looks at the first batch while it iterates, and another one is left early."""
    batches, _ = make()
    wrapped = batches.wrap(loader([1, 2, 3, 4]))
    seen = []
    for batch in wrapped:
        seen.append(batch)
        assert next(iter(wrapped)) == 1
    assert seen == [1, 2, 3, 4]


def test_an_iterator_that_goes_on_elsewhere() -> None:
    """Nothing may be held back from it: it would be missing there."""
    batches, _ = make()

    class Stream:
        """Its own iterator."""

        def __init__(self) -> None:
            self.items = iter(range(6))

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            return next(self.items)

    wrapped: Any = batches.wrap(Stream())
    assert [next(iter(wrapped)) for _ in range(3)] == [0, 1, 2]
    assert list(wrapped) == [3, 4, 5]


def test_a_loader_that_keeps_its_state() -> None:
    """It would keep that of a batch that has not been trained on: it is not read ahead."""
    batches, _ = make()

    class Stateful:
        """As torchdata's."""

        def __iter__(self) -> Iterator[int]:
            return iter([1, 2])

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    stateful = Stateful()
    assert batches.wrap(stateful) is stateful


def test_a_loader_that_draws_random_numbers() -> None:
    """It is not read ahead: the model would get other numbers than with ddp."""
    batches, warned = make()

    class Drawing(torch.utils.data.Dataset[Any]):
        """As augmentation does."""

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> float:
            return float(torch.rand(()))

    torch.manual_seed(0)
    plain = [(float(x), float(torch.rand(()))) for x in DataLoader(Drawing(), batch_size=None)]
    torch.manual_seed(0)
    ours = [(float(x), float(torch.rand(()))) for x in batches.wrap(DataLoader(Drawing(), batch_size=None))]
    assert ours == plain
    assert len(warned) == 1 and "draws random numbers" in warned[0]


def test_attributes_are_the_loaders_own() -> None:
    """Fabric's wrapper takes them from the instance; the length is that of the loader."""
    plain = loader([1, 2, 3])
    wrapped = make()[0].wrap(plain)
    assert len(wrapped) == 3
    assert wrapped.dataset is plain.dataset is vars(wrapped)["dataset"]
    assert wrapped.multiprocessing_context is None, "a property of its class"


def test_an_error_of_the_loader_comes_with_its_batch() -> None:
    """Not one batch early."""
    batches, _ = make()

    def items() -> Iterator[int]:
        yield from (1, 2, 3)
        raise ValueError("bad file")

    class Broken:
        def __iter__(self) -> Iterator[int]:
            return items()

    seen = []
    try:
        for batch in batches.wrap(Broken()):
            seen.append(batch)
    except ValueError as error:
        seen.append(str(error))
    assert seen == [1, 2, 3, "bad file"]
