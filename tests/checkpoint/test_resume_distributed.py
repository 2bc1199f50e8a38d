"""A run that goes on from a checkpoint equals the run that was not interrupted, to 1e-10 in fp64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from lightning_embrace.checkpoint.ranks import KEY
from tests.checkpoint.runs import EPOCHS, STEPS, Result, Way, assert_goes_on, run, saved, saved_after
from tests.support.ranks import Ranks

pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

LAYOUTS = ("full", "sharded")
#: after how many steps a run is cut: where Lightning itself does not go forward in a loader, at the end of an epoch
CUTS = {"sized": STEPS, "iterable": STEPS, "stateful": STEPS + 2, "stream": STEPS + 2}
KINDS = [kind if kind in ("stateful", "stream") else pytest.param(kind, marks=pytest.mark.matrix) for kind in CUTS]
#: where other ranks go on, the positions in an epoch are not theirs
OTHERS = {"sized": 3, "iterable": 1, "stateful": 3, "stream": 1}


class Case(NamedTuple):
    """One entry of the matrix: how two ranks train and save, and how many go on."""

    way: Way
    world_size: int

    def __str__(self) -> str:
        return " ".join([*map(str, self.way[:4]), f"N=2 to {self.world_size}"])


MATRIX = [
    Case(Way(kind, layout, schedule, communication, draws=not other), OTHERS[kind] if other else 2)
    for communication, layout, schedule, kind, other in itertools.product(
        ("torch", "horovod"), LAYOUTS, ("2d", "fifo"), CUTS, (False, True)
    )
]
SAMPLE = [
    Case(Way("stateful", "full", "2d"), 2),
    Case(Way("stream", "full", "fifo"), 2),
    Case(Way("sized", "full", "2d"), 2),
    Case(Way("sized", "full", "fifo", draws=False), 3),
    Case(Way("iterable", "full", "2d", draws=False), 1),
    *(Case(Way(kind, "sharded", "2d", draws=other == 2), other) for kind, other in [("stateful", 2), ("sized", 3)]),
]
assert set(SAMPLE) <= set(MATRIX)


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory) -> Callable[[Way], tuple[list[Result], Path]]:
    """What a run of two ranks that nobody interrupted came to, and the folder of its checkpoints."""

    @functools.lru_cache(maxsize=2)
    def make(way: Way) -> tuple[list[Result], Path]:
        folder = tmp_path_factory.mktemp("run")
        return ranks(2).run(saved, way, 2, str(folder)), folder

    return make


def check(ranks: Callable[[int], Ranks], whole: Any, case: Case) -> None:
    results, folder = whole(case.way)
    steps = CUTS[case.way.kind] if case.world_size == 2 else STEPS
    path = folder / (f"step={steps}.ckpt" if steps % STEPS else "after-epoch=0.ckpt")
    for rank, ours in enumerate(ranks(case.world_size).run(run, case.way, case.world_size, str(path))):
        assert len(ours.losses) == EPOCHS * STEPS - steps
        assert_goes_on(ours, results[min(rank, 1)])


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_goes_on_exactly(ranks, whole, case):
    """Every loader, with late updates, a schedule, dropout and each rank's random numbers; on other ranks without."""
    check(ranks, whole, case)


@pytest.mark.matrix
@pytest.mark.parametrize("case", [c for c in MATRIX if c.way.communication == "torch"], ids=str)
def test_goes_on_exactly_everywhere(ranks, whole, case):
    """The full product."""
    check(ranks, whole, case)


@pytest.mark.horovod
def test_goes_on_exactly_over_horovod(ranks, whole):
    """One of those over Horovod."""
    check(ranks, whole, Case(Way("stateful", "full", "2d", "horovod"), 2))


@pytest.mark.horovod
@pytest.mark.matrix
@pytest.mark.parametrize("case", [c for c in MATRIX if c.way.communication == "horovod"], ids=str)
def test_goes_on_exactly_over_horovod_everywhere(ranks, whole, case):
    """The full product over Horovod."""
    check(ranks, whole, case)


def test_draws_matter(ranks, whole):
    """What the comparison rests on: the ranks drew different numbers, and a run without its numbers is another one."""
    way = Way("stateful", "full", "2d")
    results, folder = whole(way)
    assert results[0].own[0] != results[1].own[0]
    checkpoint = torch.load(folder / f"step={STEPS + 2}.ckpt", weights_only=True)
    del checkpoint[KEY]
    path = folder / "without.ckpt"
    torch.save(checkpoint, path)
    ours, _ = ranks(2).run(run, way, 2, str(path))
    assert ours.losses[0] != results[0].losses[-len(ours.losses)]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_with_the_last_batch_of_an_epoch(ranks, whole, kind):
    """Lightning begins the next epoch with the iterator that it has made from the state at the end of the old one."""
    way = Way(kind, "full", "2d")
    results, folder = whole(way)
    for rank, ours in enumerate(ranks(2).run(run, way, 2, str(folder / f"step={STEPS}.ckpt"))):
        assert len(ours.losses) == (EPOCHS - 1) * STEPS
        assert_goes_on(ours, results[rank])


@pytest.mark.parametrize("kind", KINDS)
def test_saved_in_validation(ranks, whole, kind):
    """At the end of an epoch: Lightning ends that epoch then, and makes another iterator for the next."""
    # torchdata draws a seed for the iterator of a stream that has ended, and another one for the next
    way = Way(kind, schedule="fifo", draws=kind != "stream", validates=True)
    results, folder = whole(way)
    for rank, ours in enumerate(ranks(2).run(run, way, 2, str(folder / "after-epoch=0.ckpt"))):
        assert len(ours.losses) == (EPOCHS - 1) * STEPS
        assert_goes_on(ours, results[rank])


def test_loaders_that_were_set_up_early(ranks, whole):
    """`trainer.estimated_stepping_batches` does it before Lightning knows what they go on from, and forgets that."""
    check(ranks, whole, Case(Way("stateful", schedule="fifo", estimates=True), 2))


@pytest.mark.parametrize("kind", ["sized", "iterable"])
def test_amid_an_epoch_as_ddp(ranks, tmp_path, kind):
    """Loaders without a state begin anew there, as they do under ddp: the same batches are trained on."""
    results = []
    for strategy, way in (("ddp", "ddp"), ("embrace", Way(kind, draws=False))):
        folder = tmp_path / strategy
        options = {"kind": kind, "draws": False} if strategy == "ddp" else {}
        ranks(2).run(saved, way, 2, str(folder), **options)
        results.append(ranks(2).run(run, way, 2, str(folder / f"step={STEPS + 2}.ckpt"), **options))
    for theirs, ours in zip(*results):
        assert ours.losses and len(ours.losses) == len(theirs.losses)
        torch.testing.assert_close(ours.losses, theirs.losses, rtol=0, atol=1e-10)
        torch.testing.assert_close(ours.state, theirs.state, rtol=0, atol=1e-10)


def check_amid(ranks: Callable[[int], Ranks], path: Path, way: Way, batches: int) -> None:
    whole_run = ranks(2).run(saved_after, way, 2, str(path), batches, accumulate_grad_batches=2)
    for rank, ours in enumerate(ranks(2).run(run, way, 2, str(path), accumulate_grad_batches=2)):
        assert len(ours.losses) == EPOCHS * STEPS - (batches - 1)
        assert_goes_on(ours, whole_run[rank])


@pytest.mark.parametrize(("kind", "batches"), [("stateful", 3), ("stream", 3), ("stateful", 5)], ids=str)
def test_amid_accumulation(ranks, tmp_path, kind, batches):
    """Of a window of two batches one has been trained on, in the first epoch or the second, at its beginning or later.
    The checkpoint says that it is still to come; buffers have not seen it either, and the ranks have not drawn."""
    check_amid(ranks, tmp_path / "amid.ckpt", Way(kind), batches)


@pytest.mark.matrix
@pytest.mark.parametrize("batches", [1, 3, 5, 7], ids=str)
@pytest.mark.parametrize("schedule", ["2d", "fifo"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["stateful", "stream"])
def test_amid_accumulation_everywhere(ranks, tmp_path, kind, layout, schedule, batches):
    """The full product."""
    check_amid(ranks, tmp_path / "amid.ckpt", Way(kind, layout, schedule), batches)


def heard(path: str) -> tuple[Result, list[str]]:
    with mock.patch("lightning.pytorch.utilities.rank_zero.rank_zero_info") as info:
        result = run(Way("sized", draws=False), 2, path)
    return result, [str(call.args[0]) for call in info.call_args_list]


def test_a_file_of_ddps_has_no_random_states(ranks, tmp_path):
    """It is said once, and training goes on with the generators that are there; random states do not upset ddp."""
    options: dict[str, Any] = {"kind": "sized", "draws": False}
    theirs = ranks(2).run(saved, "ddp", 2, str(tmp_path / "ddp"), **options)
    path = str(tmp_path / "ddp" / "after-epoch=0.ckpt")
    for rank, (ours, said) in enumerate(ranks(2).run(heard, path)):
        assert_goes_on(ours, theirs[rank])
        assert sum("was not written under `embrace`" in line for line in said) == 1
    ranks(2).run(saved, Way("sized", draws=False), 2, str(tmp_path / "embrace"))
    for rank, ours in enumerate(
        ranks(2).run(run, "ddp", 2, str(tmp_path / "embrace" / "after-epoch=0.ckpt"), **options)
    ):
        assert_goes_on(ours, theirs[rank])
