"""Outside training steps no look-up needs a partner, and it sees the rows of the right version."""

from __future__ import annotations

import functools
import os
import time

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader

from tests.support.training import train
from tests.tables.scripts import ALL, Scripted, look

V = 9
_TABLES = {
    "t": functools.partial(nn.Embedding, V, 5, padding_idx=1),
    "narrow": functools.partial(nn.Embedding, V, 1),
    "bag": functools.partial(nn.EmbeddingBag, V, 4, mode="sum", padding_idx=0),
    "largest": functools.partial(nn.EmbeddingBag, V, 4, mode="max"),
}
_CALLS = [
    look("t", [[1, 2], [3, 4]]),
    look("narrow", torch.tensor([8, 0], dtype=torch.int32)),
    look("bag", [[0, 1, 2, 3, 4, 5]]),
    look("bag", [1, 2, 0], [0, 0, 2], weights=[0.5, 2.0, 3.0]),
    look("largest", [[1, 2, 3]]),
    look("t", torch.empty(2, 0, dtype=torch.int64)),
    look("t", torch.tensor(7)),
]
_TRAINING = [[[look("t", [1, 2, 7]), look("bag", [[1, 2]])], [look("narrow", [8]), look("largest", [[2, 3]])]]] * 4


class Evaluated(Scripted):
    """Validates inside fit with a batch count of its rank's own, and notes what the look-ups returned."""

    def __init__(self, optimizer: str, batches: list[int], **tables) -> None:
        super().__init__(optimizer, **tables)
        self.batches, self.notes = batches, []

    def note(self, when: str) -> None:
        with torch.no_grad():
            values = torch.cat([self.look_up(call).flatten() for call in _CALLS])
        self.notes.append((when, self.trainer.global_step, values))

    def val_dataloader(self):
        count = self.batches[self.global_rank if self.trainer.world_size > 1 else -1]
        return DataLoader([torch.zeros(1)] * count, batch_size=None)

    def validation_step(self, batch, batch_idx) -> None:
        self.note("validation")


class Alone(Callback):
    """Looks up on one rank only, wherever Lightning has a hook, while the others hurry on or dawdle."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def _look(self, trainer, model, when: str) -> None:
        if trainer.world_size == 1 or trainer.global_rank == self.rank:
            model.note(when)

    def on_fit_start(self, trainer, model) -> None:
        self._look(trainer, model, "fit start")

    def on_train_start(self, trainer, model) -> None:
        self._look(trainer, model, "train start")

    def on_before_backward(self, trainer, model, *args) -> None:
        self._look(trainer, model, "before backward")

    def on_train_epoch_end(self, trainer, model) -> None:
        self._look(trainer, model, "epoch end")

    def on_train_batch_start(self, trainer, model, *args) -> None:
        self._look(trainer, model, "batch start")

    def on_before_zero_grad(self, trainer, model, *args) -> None:
        if trainer.world_size > 1 and trainer.global_rank != self.rank:
            time.sleep(0.05)  # its table is one version behind when the other asks

    def on_train_batch_end(self, trainer, model, *args) -> None:
        self._look(trainer, model, "batch end")

    def on_validation_epoch_start(self, trainer, model) -> None:
        self._look(trainer, model, "validation start")

    def on_train_end(self, trainer, model) -> None:
        self._look(trainer, model, "train end")


def _notes_on_rank(make_model, data, rank):
    me, world_size = int(os.environ["LOCAL_RANK"]), len(data[0])
    model, _ = train(
        make_model, [[s[me]] for s in data], ALL(), world_size, callbacks=[Alone(rank)], val_check_interval=2
    )
    return model.notes


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("batches", [[1, 3], [3, 1]])
def test_versions(ranks, rank, batches):
    """Uneven validation and look-ups of one rank alone return what one process has at the same point."""
    make = functools.partial(Evaluated, "adam", [*batches, max(batches)], **_TABLES)
    plain, _ = train(make, [list(s) for s in _TRAINING], "auto", callbacks=[Alone(0)], val_check_interval=2)
    expected: dict[tuple[str, int], torch.Tensor] = {}
    for when, step, values in plain.notes:
        expected.setdefault((when, step), values)
    seen = ranks(2).run(_notes_on_rank, make, _TRAINING, rank)
    for me, notes in enumerate(seen):
        assert len([n for n in notes if n[0] == "validation"]) == 2 * batches[me]
        for when, step, values in notes:
            torch.testing.assert_close(
                values, expected[when, step], rtol=0, atol=1e-12, msg=lambda m, w=when: f"{w}: {m}"
            )
    assert {n[0] for n in seen[rank]} >= {n[0] for n in plain.notes} - {"validation"}


def test_three_ranks_ask_at_once(ranks):
    """Every rank asks and serves at the same time; ranks without columns of a table only ask."""
    make = functools.partial(Evaluated, "sgd", [5, 5, 5, 5], **_TABLES)
    data = [[*step, []] for step in _TRAINING]
    plain, _ = train(make, [list(s) for s in data], "auto", val_check_interval=2)
    for notes in ranks(3).run(_notes_on_rank, make, data, 3):
        assert len(notes) == len(plain.notes) == 10
        for (_, _, mine), (_, _, values) in zip(notes, plain.notes):
            torch.testing.assert_close(mine, values, rtol=0, atol=1e-12)


class BadId(Evaluated):
    """One rank looks a bad id up in validation."""

    def validation_step(self, batch, batch_idx) -> None:
        if self.global_rank == 1 and self.trainer.global_step > 0:
            self.t(torch.tensor([1, V]))
        self.t(torch.tensor([2]))


class BadIdAlone(Callback):
    """One rank looks a bad id up in a callback."""

    def on_train_batch_end(self, trainer, model, *args) -> None:
        if trainer.global_rank == 1:
            model.t(torch.tensor(-1))


class BeforeTheStep(Callback):
    """Looks up while another rank may step its optimizer."""

    def on_after_backward(self, trainer, model) -> None:
        if trainer.global_rank == 1:
            model.t(torch.tensor(1))


class LoadsAlone(Callback):
    """Loads weights on one rank, and looks up there or not."""

    def __init__(self, look_up: bool) -> None:
        self.look_up = look_up

    def on_train_batch_start(self, trainer, model, batch, batch_idx) -> None:
        if trainer.global_rank == 1 and batch_idx == 1:
            model.t.load_state_dict({"weight": torch.zeros(V, 5)})
            if self.look_up:
                model.t(torch.tensor(1))


class LooksUpTooLate(Callback):
    """One rank still looks up when the other has loaded other weights."""

    def on_train_batch_end(self, trainer, model, *args) -> None:
        if trainer.global_rank == 1:
            time.sleep(0.3)
            model.t(torch.tensor(1))
        model.t.load_state_dict({"weight": torch.zeros(V, 5)})


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (BeforeTheStep(), "was made between backward and the optimizer's step"),
        (LoadsAlone(False), "The tables have changed [1, 2] times on the ranks"),
        (LoadsAlone(True), "rank 0 was in its next training step with an older version of the table"),
        (LooksUpTooLate(), "rank 0 had changed the table already"),
    ],
    ids=["before the step", "loads alone", "loads and looks up alone", "too late"],
)
def test_version_that_cannot_be_had(ranks, callback, words):
    """Rows of a version that is gone, or will never come, are an error and neither mixed rows nor a wait for ever.

    Regression: a look-up between backward and the optimizer's step got some columns from before and some from after it.
    """
    try:
        make = functools.partial(Evaluated, "sgd", [1, 1], **_TABLES)
        (other, _), (mine, _) = ranks(2).run(_fails_on_rank, make, [callback], timeout=60.0)
    finally:
        ranks(2).stop()
    assert words in mine
    assert words in other
    assert "RuntimeError: " in mine  # its own, or the other one's where both see it and that one is faster


def _fails_on_rank(make_model, callbacks):
    me = int(os.environ["LOCAL_RANK"])
    begun = time.monotonic()
    try:
        train(make_model, [[s[me]] for s in _TRAINING], ALL(), 2, val_check_interval=2, callbacks=callbacks)
    except BaseException as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return None, 0.0


@pytest.mark.parametrize(
    ("model", "callbacks", "bad"), [(BadId, [], V), (Evaluated, [BadIdAlone()], -1)], ids=["validation", "callback"]
)
def test_bad_id(ranks, model, callbacks, bad):
    """The rank that looks it up raises; the others, which need not be looking up anything, end as well."""
    try:
        make = functools.partial(model, "sgd", [1, 1], **_TABLES)
        (other, _), (mine, _) = ranks(2).run(_fails_on_rank, make, callbacks, timeout=60.0)
    finally:
        ranks(2).stop()
    words = f"Rank 1 looked up id {bad} in table 't', whose ids range from 0 to {V - 1}"
    assert mine.startswith(f"IndexError: {words}")
    assert other.startswith("RankFailedError: rank 1 failed")
    assert words in other
