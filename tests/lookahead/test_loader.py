"""A loader that holds one batch ahead trains like the loader itself, with the real loops of Lightning."""

from __future__ import annotations

import random as random_
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_embrace.lookahead.ahead import Lookahead
from tests.lookahead.world import Listening, Looking, Stateful, Stream, fit, plain, sized


class Reloading(Listening):
    """Another loader in every epoch."""

    def train_dataloader(self) -> Any:
        return sized(3, start=10 * self.trainer.current_epoch)


class Again(list[Any]):
    """A plain iterable with a length."""


class EveryEpoch:
    """A plain iterable without a length, made of generators."""

    def __iter__(self) -> Any:
        return (torch.tensor([i]) for i in range(3))


def endless() -> Any:
    n = 0
    while True:
        yield torch.tensor([n])
        n += 1


def shuffled() -> Any:
    data = TensorDataset(torch.arange(12))
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 1, shuffle=True))


def random() -> Any:
    data = TensorDataset(torch.arange(8))
    return DataLoader(data, batch_size=2, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(1)))


def stream(count: int = 3) -> Any:
    return DataLoader(Stream(count), batch_size=None)


def combined(mode: str, second: Callable[[], Any] = lambda: sized(2, start=50)) -> Any:
    return CombinedLoader({"a": sized(4), "b": [second()]}, mode)


#: name: what makes the loader, Trainer arguments
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "sized": (lambda: sized(3), {}),
    "one batch": (lambda: sized(1), {}),
    "epochs are shuffled": (shuffled, {"max_epochs": 3}),
    "random": (random, {}),
    "workers": (lambda: sized(3, num_workers=1, persistent_workers=True), {}),
    "stream": (stream, {}),
    "stream of one": (lambda: stream(1), {}),
    "stream of none": (lambda: stream(0), {}),
    "list": (lambda: Again(torch.arange(6).view(3, 2)), {}),
    "iterable": (EveryEpoch, {}),
    "limit": (lambda: sized(5), {"limit_train_batches": 2}),
    "share": (lambda: sized(6), {"limit_train_batches": 0.5}),
    "limited stream": (stream, {"limit_train_batches": 2}),
    "endless": (endless, {"limit_train_batches": 3, "max_epochs": 3}),
    "endless to the last step": (endless, {"max_steps": 4, "max_epochs": -1}),
    "one fast batch": (lambda: sized(5), {"fast_dev_run": True}),
    "overfit": (lambda: sized(5), {"overfit_batches": 2}),
    "max_steps": (lambda: sized(3), {"max_steps": 5, "max_epochs": -1}),
    "validation in between": (lambda: sized(4), {"val_check_interval": 2}),
    "validation after some": (stream, {"val_check_interval": 2, "check_val_every_n_epoch": None}),
    "accumulation": (lambda: sized(3), {"accumulate_grad_batches": 2}),
    "accumulation on a stream": (stream, {"accumulate_grad_batches": 2}),
    "sanity check": (lambda: sized(3), {"num_sanity_val_steps": 1}),
    "min_size": (lambda: combined("min_size"), {}),
    "max_size": (lambda: combined("max_size"), {}),
    "max_size_cycle": (lambda: combined("max_size_cycle"), {"max_epochs": 3}),
    "min_size with a stream": (lambda: combined("min_size", stream), {}),
    "max_size with a stream": (lambda: combined("max_size", stream), {}),
    "cycle with a stream": (lambda: combined("max_size_cycle", stream), {}),
    "limited cycle": (lambda: combined("max_size_cycle", stream), {"limit_train_batches": 3}),
    "cycle over a list": (lambda: [sized(3), sized(2, start=50)], {}),
    "stateful": (lambda: Stateful(3, sized=True), {}),
    "stateful stream": (lambda: Stateful(3, sized=False), {}),
    "stateful with a limit": (lambda: Stateful(4, sized=True), {"limit_train_batches": 2}),
    "stateful pair": (lambda: CombinedLoader([Stateful(3, True), Stateful(2, False)], "max_size"), {}),
}


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "only the ends"])
@pytest.mark.parametrize("case", CASES)
def test_trains_like_the_loader_itself(case, ahead):
    """Batches, their numbers, the flag of the last one, validation runs, steps and saved positions."""
    make, arguments = CASES[case]
    expected, _ = fit(Looking(wrapping=False), make(), **arguments)
    model, _ = fit(Looking(ahead), make(), **arguments)
    if case in ("stateful stream", "stateful pair"):  # see the next test
        for heard in (model.heard, expected.heard):
            heard[:] = [entry for entry in heard if entry[0] != "state"]
    assert model.heard == expected.heard
    assert model.steps == expected.steps


def positions(strategy: Looking, loader: Any) -> list[list[int]]:
    model, _ = fit(strategy, loader, max_epochs=1)
    return [[state["position"] for state in entry[1]] for entry in model.heard if entry[0] == "state"]


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "only the ends"])
def test_a_stream_is_saved_where_training_is(ahead):
    """Lightning fetches one batch ahead where it knows no length, and saves the state behind that: whoever goes on from
    there has lost a batch."""
    assert positions(Looking(wrapping=False), Stateful(4, sized=False)) == [[2], [3], [4], [4]]
    assert positions(Looking(ahead), Stateful(4, sized=False)) == [[1], [2], [3], [4]]
    pair = CombinedLoader([Stateful(4, True), Stateful(2, False)], "max_size")
    assert positions(Looking(ahead), pair) == [[1, 1], [2, 2], [3, 2], [4, 2]]


@pytest.mark.parametrize("case", CASES)
def test_pairs_each_batch_with_its_successor(case):
    make, arguments = CASES[case]
    strategy = Looking()
    model, _ = fit(strategy, make(), **arguments)
    trained = [entry for entry in model.heard if isinstance(entry[0], int)]
    assert [plain(pair.current) for pair in strategy.pairs] == [batch for _, batch, _ in trained]
    assert not any(pair.known for pair in strategy.pairs[:1])  # it is not known yet whether the loader draws
    for pair, (_, _, last), following in list(zip(strategy.pairs, trained, [*trained[1:], None]))[1:]:
        if following is None or following[0] == 0:
            # the end of the data; a fit may end before it, and a combination before the ends of all its loaders
            assert not (pair.known and last) or type(make()) in (CombinedLoader, list)
        elif "cycle" in case:
            assert pair.known and covers(plain(pair.successor), following[1])
        else:
            assert pair.known and plain(pair.successor) == following[1]


def covers(successor: Any, batch: Any) -> bool:
    """A loader that is about to start over is not known."""
    foreseen = list(zip(leaves_of(successor), leaves_of(batch), strict=True))
    return all(s in (None, b) for s, b in foreseen) and any(s is not None for s, _ in foreseen)


def leaves_of(batch: Any) -> list[Any]:
    return [batch["a"], *batch["b"]] if isinstance(batch, dict) else batch


def test_nothing_is_held_beyond_what_is_trained_on():
    """A stream that goes on over epochs loses no sample, and a loader is not asked for what nobody needs."""
    seen: list[int] = []

    class Watching(list[int]):
        def __getitem__(self, index: Any) -> Any:
            seen.append(index)
            return index

    fit(Looking(), DataLoader(Watching(range(10))), limit_train_batches=4, max_epochs=1)
    assert seen == [0, 1, 2, 3]


def test_loaders_are_reloaded():
    strategy = Looking()
    model, _ = fit(strategy, None, model=Reloading(), reload_dataloaders_every_n_epochs=1, max_epochs=3)
    expected, _ = fit(
        Looking(wrapping=False), None, model=Reloading(), reload_dataloaders_every_n_epochs=1, max_epochs=3
    )
    assert model.heard == expected.heard
    trained = [entry[1] for entry in model.heard if isinstance(entry[0], int)]
    assert [plain(p.successor) if p.known else None for p in strategy.pairs] == [
        None, trained[2], None, None, trained[5], None, None, trained[8], None,
    ]  # fmt: skip


def test_a_combined_loader_of_the_user_is_used_again():
    """Lightning leaves the wrappers in it: they are replaced in the next fit, and harmless elsewhere."""
    loader = combined("max_size_cycle")
    expected, _ = fit(Looking(wrapping=False), combined("max_size_cycle"))
    for strategy in (Looking(), Looking(), Looking(wrapping=False)):
        model, _ = fit(strategy, loader)
        assert model.heard == expected.heard


class Straying(Callback):
    """Iterates over the training loader while it is trained on, as a callback on one rank may."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append([plain(batch) for batch in trainer.train_dataloader])


@pytest.mark.parametrize("make", [lambda: sized(3), EveryEpoch], ids=["sized", "stream"])
def test_whoever_else_iterates_disturbs_nothing(make):
    """The ranks are not asked, and the pairs go on."""
    strategy, alone = Looking(), Looking()
    straying = Straying()
    model, _ = fit(strategy, make(), straying, max_epochs=1)
    expected, _ = fit(alone, make(), max_epochs=1)
    assert model.heard == expected.heard and strategy.asked == alone.asked
    assert [plain(p) for p in strategy.pairs] == [plain(p) for p in alone.pairs]
    assert straying.seen[0] == [plain(batch) for batch in make()]


class Augmented(list[Any]):
    """A dataset that draws random numbers for every sample, as augmentations and negative samples do."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__(range(8))
        self.draw = draw

    def __getitem__(self, index: Any) -> Tensor:
        return torch.tensor([float(index), float(self.draw())])


class Dropping(Listening):
    """Draws random numbers in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.heard.append((torch.rand(1).item(), random_.random(), np.random.rand()))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: random_.random(), lambda: np.random.rand()])
def test_random_numbers_come_in_the_order_of_plain_training(draw):
    """Loader and model draw from the same generator: fetching ahead would give both other numbers than ddp has."""
    heard = {}
    for wrapping in (True, False):
        seed_everything(4, verbose=False)
        strategy = Looking(wrapping=wrapping)
        model, _ = fit(strategy, DataLoader(Augmented(draw), batch_size=2, shuffle=True), model=Dropping())
        heard[wrapping] = model.heard
        assert len(strategy.warnings) == wrapping
    assert heard[True] == heard[False]


def test_a_seed_drawn_once_does_not_matter():
    """A shuffling sampler draws a seed from the shared generator in every epoch: what follows is its own."""
    heard = {}
    for wrapping in (False, True):
        seed_everything(4, verbose=False)
        strategy = Looking(wrapping=wrapping)
        model, _ = fit(strategy, sized(4, shuffle=True), model=Dropping())
        heard[wrapping] = model.heard
    assert heard[True] == heard[False]
    assert not strategy.warnings and sum(pair.known for pair in strategy.pairs) == 5


class Failing:
    def __iter__(self) -> Any:
        yield torch.tensor([0])
        yield torch.tensor([1])
        raise KeyError("broken file")


def test_an_error_of_the_loader_comes_when_its_batch_would():
    model = Listening()
    with pytest.raises(KeyError, match="broken file"):
        fit(Looking(), Failing(), model=model)
    expected = Listening()
    with pytest.raises(KeyError, match="broken file"):
        fit(Looking(wrapping=False), Failing(), model=expected)
    assert model.heard == expected.heard and len(model.heard) > 0


@pytest.mark.parametrize("is_sized", [True, False])
def test_goes_on_from_a_checkpoint_at_the_trained_position(tmp_path, is_sized):
    """No batch is left out or trained on twice: the look-ahead is not in the checkpoint."""

    class Saving(Callback):
        def on_train_batch_end(self, trainer: Any, _: Any, __: Any, ___: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "after-2.ckpt")
                trainer.should_stop = True

    heard = {}
    for wrapping in (True, False):
        fit(Looking(wrapping=wrapping), Stateful(5, is_sized), Saving(), max_epochs=1)
        model, _ = fit(
            Looking(wrapping=wrapping), Stateful(5, is_sized), ckpt_path=tmp_path / "after-2.ckpt", max_epochs=1
        )
        heard[wrapping] = model.heard
    assert heard[True][0] == (2, [3], False)
    if is_sized:
        assert heard[True] == heard[False]
    else:
        assert heard[False][0] == (2, [4], False)  # Lightning saves the state behind what it has fetched ahead


def test_a_resumed_epoch_has_its_own_order(tmp_path):
    """Lightning makes the iterator before it sets the sampler's epoch: fetching then would give epoch 0's order."""

    class Saving(Callback):
        def on_train_epoch_end(self, trainer: Any, _: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "epoch-0.ckpt")

    whole, _ = fit(Looking(), shuffled(), Saving())
    rest, _ = fit(Looking(), shuffled(), ckpt_path=tmp_path / "epoch-0.ckpt")
    assert 0 < len(rest.heard) < len(whole.heard) and rest.heard == whole.heard[-len(rest.heard) :]


class Skipping(Listening):
    """Leaves every epoch before its second batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


def test_an_iterator_that_goes_on_loses_no_batch():
    """An abandoned iteration drops what it holds, unless the next one goes on where it was."""
    for make in (endless, lambda: sized(4), EveryEpoch):
        expected, _ = fit(Looking(wrapping=False), make(), model=Skipping(), max_epochs=3)
        strategy = Looking()
        model, _ = fit(strategy, make(), model=Skipping(), max_epochs=3)
        assert model.heard == expected.heard and len(model.heard) == 3
        trained = [batch for _, batch, _ in model.heard]
        assert [plain(pair.current) for pair in strategy.pairs[::2]] == trained


def test_the_state_after_a_fit_is_the_loaders_own():
    """Lightning resets a DataLoader then, which is a new one's state from there on."""
    loader = Stateful(3, sized=True)
    loader._iterator = None
    _, trainer = fit(Looking(), loader, max_steps=2)
    assert trainer.fit_loop._combined_loader._state_dicts() == [loader.state_dict()] == [{"position": 3, "finished": 0}]


def test_a_batch_that_no_rank_trains_on_is_not_in_the_state():
    """Another rank has none: this one's first batch is fetched and never handed out."""
    wrapped = Lookahead(lambda bit: [bit, False], lambda _: None).process(Stateful(3, sized=False))
    assert list(CombinedLoader(wrapped, "max_size_cycle")) == []
    assert wrapped.state_dict() == {"position": 0, "finished": False}


def test_attributes_are_the_loaders():
    """Lightning sets `worker_init_fn` and the sampler's epoch through the wrapper."""
    loader = shuffled()
    wrapped = Lookahead(lambda bit: [bit], print).process(loader, 3)
    assert wrapped.dataset is loader.dataset and wrapped.sampler is loader.sampler and len(wrapped) == 3
    wrapped.worker_init_fn = print
    assert loader.worker_init_fn is print
    assert not hasattr(wrapped, "nonsense") and not hasattr(wrapped, "state_dict")
    with pytest.raises(TypeError):
        len(Lookahead(lambda bit: [bit], print).process(stream()))
