"""Files with whole tables are written without any rank holding a whole table, unless somebody reads it."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import AsyncCheckpointIO, Precision, TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.benchmarks.own_ranks import status
from lightning_embrace.checkpoint.agreement import CheckpointError
from lightning_embrace.checkpoint.atomic import PARTIAL
from lightning_embrace.checkpoint.ranks import KEY
from tests.support.lifecycle import (
    At,
    Whole,
    assert_same,
    loader,
    make_model,
    make_strategy,
    make_trainer,
    plain,
    results,
    this_rank,
)

# ---- who gathers -------------------------------------------------------------------------------------------------


@contextmanager
def counting() -> Iterator[list[str]]:
    """Names of tables that are put together in memory."""
    from lightning_embrace.tables import shard

    gathered: list[str] = []

    def gather(comm: Any, table: Any, *rest: Any, **named: Any) -> Any:
        gathered.append(table.name)
        return shard.gather_columns(comm, table, *rest, **named)

    with (
        patch("lightning_embrace.shards.gather_columns", gather),
        patch("lightning_embrace.checkpoint.optimizer_state.gather_columns", gather),
    ):
        yield gathered


class Overriding(Whole):
    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        return super().state_dict(*arguments, **named)


class Given(Whole):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["sum"] = float(checkpoint["state_dict"]["words.weight"].sum())


class Table(nn.Embedding):
    """A table of the user's that saves itself in its own way."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"] * 1


class OwnTable(Whole):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.words = Table(23, 5).double()


class Silent(Callback):
    """Has other hooks than those that see checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}


class OnSave(Callback):
    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["sum"] = float(checkpoint["state_dict"]["words.weight"].sum())


class OwnAverage(EMAWeightAveraging):
    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, module, checkpoint)
        checkpoint["sum"] = float(checkpoint["state_dict"]["words.weight"].sum())


class OwnPrecision(Precision):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["sum"] = float(checkpoint["state_dict"]["words.weight"].sum())


def hooked(**arguments: Any) -> Whole:
    model = Whole(**arguments)
    model.register_state_dict_post_hook(lambda module, state, *_: state.update(sum=state["words.weight"].sum()))
    return model


class OwnIO(TorchCheckpointIO):
    """Looks at what it writes."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        checkpoint["sum"] = float(checkpoint["state_dict"]["words.weight"].sum())
        super().save_checkpoint(checkpoint, path, storage_options)


#: name: model, callbacks, plugins, weights only; and whether tables are gathered
CASES: dict[str, tuple[Any, Any, Any, bool, bool]] = {
    "plain": (Whole, lambda: [], lambda: [], False, False),
    "silent callback": (Whole, lambda: [Silent()], lambda: [], False, False),
    "ema": (Whole, lambda: [EMAWeightAveraging(decay=0.5)], lambda: [], False, False),
    "swa": (Whole, lambda: [StochasticWeightAveraging(0.02, swa_epoch_start=1)], lambda: [], False, False),
    "callback, weights only": (Whole, lambda: [OnSave()], lambda: [], True, False),
    "torch's io": (Whole, lambda: [], lambda: [TorchCheckpointIO()], False, False),
    "callback": (Whole, lambda: [OnSave()], lambda: [], False, True),
    "callback of rank 0": (Whole, lambda: [OnSave()] * (this_rank() == 0), lambda: [], False, True),
    "lambda": (Whole, lambda: [LambdaCallback(on_save_checkpoint=lambda *_: None)], lambda: [], False, True),
    "own average": (Whole, lambda: [OwnAverage(decay=0.5)], lambda: [], False, True),
    "pruning": (Whole, lambda: [ModelPruning("l1_unstructured")], lambda: [], False, True),
    "state_dict": (Overriding, lambda: [], lambda: [], False, True),
    "on_save_checkpoint": (Given, lambda: [], lambda: [], True, True),
    "own table": (OwnTable, lambda: [], lambda: [], True, True),
    "hook": (hooked, lambda: [], lambda: [], True, True),
    "precision": (Whole, lambda: [], lambda: [OwnPrecision()], False, True),
    "io": (Whole, lambda: [], lambda: [OwnIO()], True, True),
    "async io": (Whole, lambda: [], lambda: [AsyncCheckpointIO()], True, True),
}


def save_case(strategy: str, case: str, path: str) -> list[str]:
    make, callbacks, plugins, weights_only, _ = CASES[case]
    with counting() as gathered:
        seen: list[str] = []

        def save(trainer: Any, _: Any) -> None:
            gathered.clear()
            trainer.save_checkpoint(path, weights_only)
            seen.extend(gathered)

        model, parts = make_model(cls=make), callbacks()
        for callback in parts:
            if isinstance(callback, ModelPruning):
                callback._parameters_to_prune = [(model.head, "weight")]
        trainer = make_trainer(
            make_strategy(strategy), callbacks=[*parts, At("on_train_epoch_end", save, count=2)], max_epochs=2,
            plugins=plugins(),
        )  # fmt: skip
        trainer.fit(model, loader(2), loader(1, 5))
    return seen


def load(path: Path) -> Any:
    checkpoint = torch.load(path, weights_only=False)
    checkpoint.pop(KEY, None)
    return checkpoint


@pytest.mark.parametrize("case", CASES)
def test_who_gathers(ranks, tmp_path, case):
    """Nobody does where nobody reads; whoever reads is given values, on every rank's word; the file is ddp's."""
    paths = {strategy: tmp_path / f"{strategy}.ckpt" for strategy in ("ddp", "embrace")}
    ranks(2).run(save_case, "ddp", case, str(paths["ddp"]))
    gathered = ranks(2).run(save_case, "embrace", case, str(paths["embrace"]))
    expected = CASES[case][-1]
    assert [bool(names) for names in gathered] == [expected] * 2, gathered
    assert gathered[0] == gathered[1]
    assert_same(load(paths["embrace"]), load(paths["ddp"]), tolerance=1e-10)


# ---- memory ------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 1 << 18, 64
TABLE_BYTES = ROWS * COLUMNS * 4


class Large(LightningModule):
    """Two tables of 64 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(ROWS, COLUMNS)
        self.second = nn.Embedding(ROWS, COLUMNS)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return (self.first(ids) + self.second(ids)).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def peak_of_saving(path: str) -> int:
    """Bytes that a save takes beyond what the process holds before."""
    taken: list[int] = []

    def save(trainer: Any, _: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = status("VmRSS")
        trainer.save_checkpoint(path)
        taken.append(status("VmHWM") - before)

    trainer = make_trainer(make_strategy("embrace"), callbacks=[At("on_train_batch_end", save, count=2)])
    data = [torch.arange(8) * 1000 + step for step in range(2)]
    with patch("lightning_embrace.tables.shard._PIECE_BYTES", 2 << 20):
        trainer.fit(Large(), DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return taken[0]


def test_peak_memory(ranks, tmp_path):
    """No rank takes a fraction of what one table takes, and the file has both."""
    path = tmp_path / "a.ckpt"
    taken = ranks(2).run(peak_of_saving, str(path))
    assert path.stat().st_size > 2 * TABLE_BYTES
    assert max(taken) < TABLE_BYTES // 2, f"{taken} bytes, a table has {TABLE_BYTES}"


# ---- failures ----------------------------------------------------------------------------------------------------


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def full_while_filling(number: int) -> Iterator[None]:
    """The disk is full when this many tables have been filled."""
    from lightning_embrace.checkpoint import full

    filled = []

    def fill(file: Any, room: Any, pieces: Any) -> None:
        filled.append(room)
        fill_well(file if len(filled) <= number else FullDisk(), room, pieces)  # type: ignore[arg-type]

    fill_well = full.fill
    with patch.object(full, "fill", fill):
        yield


class FullDisk:
    def seek(self, *_: Any) -> None: ...

    def write(self, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


FAILURES: dict[str, tuple[Any, str]] = {
    "skeleton": (lambda: file_size_limit(1000), "File too large"),
    "first table": (lambda: full_while_filling(0), "No space left"),
    "optimizer state": (lambda: full_while_filling(4), "No space left"),
}


def fail_to_save(folder: str, failure: str) -> Any:
    """The second of three saves fails on rank 0, and the user catches it on every rank."""
    errors: list[str] = []

    def save(trainer: Any, _: Any) -> None:
        fails = FAILURES[failure][0] if trainer.global_step == 2 and this_rank() == 0 else _nothing
        try:
            with fails():
                trainer.save_checkpoint(f"{folder}/a.ckpt")
        except CheckpointError as error:
            errors.append(str(error))
            Path(folder, f"seen-{this_rank()}").write_bytes(Path(folder, "a.ckpt").read_bytes())

    model = make_model()
    trainer = make_trainer(make_strategy("embrace"), callbacks=[At("on_train_batch_end", save)])
    trainer.fit(model, loader(3))
    return results(model, trainer), errors


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def without_saves() -> Any:
    model = make_model()
    trainer = make_trainer(make_strategy("embrace"))
    trainer.fit(model, loader(3))
    return results(model, trainer)


@pytest.mark.parametrize("failure", FAILURES)
def test_a_save_that_fails(ranks, tmp_path, failure):
    """One error on every rank; the file from before is whole, nothing else is left, and training goes on as if it had
    not been."""
    outcomes = ranks(2).run(fail_to_save, str(tmp_path), failure)
    expected = ranks(2).run(without_saves)
    said = FAILURES[failure][1]
    for rank, ((left, errors), right) in enumerate(zip(outcomes, expected)):
        assert len(errors) == 1 and said in errors[0] and "rank 0" in errors[0], errors
        assert_same(left, right)
        (tmp_path / f"seen-{rank}").rename(tmp_path / f"seen-{rank}.ckpt")
        assert torch.load(tmp_path / f"seen-{rank}.ckpt", weights_only=True)["global_step"] == 1
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["global_step"] == 3
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(PARTIAL)]


class Unsaveable(Callback):
    """Has something that cannot be pickled, on rank 0."""

    def state_dict(self) -> dict[str, Any]:
        return {"f": (lambda: None) if this_rank() == 0 else None}


def save_the_unsaveable(folder: str) -> None:
    callbacks = [ModelCheckpoint(folder, "a"), Unsaveable()]
    trainer = make_trainer(make_strategy("embrace"), callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(CheckpointError, match=r"rank 0.*(pickle|local)"):
        trainer.fit(make_model(), loader(2))


def test_what_cannot_be_pickled(ranks, tmp_path):
    """Is an error on every rank, where ddp lets the others wait."""
    ranks(2).run(save_the_unsaveable, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


# ---- weights alone -----------------------------------------------------------------------------------------------


def save_weights(folder: str, world_size: int, cls: Any) -> Any:
    """In the middle of a fit and after it."""
    states: list[Any] = []

    def save(trainer: Any, _: Any) -> None:
        with counting() as gathered:
            trainer.strategy.save_weights(f"{folder}/inside.safetensors")
        assert bool(gathered) == (cls is Overriding)
        states.append(plain(dict(trainer.strategy.full_state_dict())))

    model = make_model(cls=cls)
    at = At("on_train_batch_end", save, count=2)
    trainer = make_trainer(make_strategy("embrace"), world_size, callbacks=[at])
    trainer.fit(model, loader(3, 0, world_size))
    trainer.strategy.save_weights(Path(folder) / "after.safetensors")
    return states[0], plain(dict(model.state_dict()))


@pytest.mark.parametrize(("world_size", "cls"), [(2, Whole), (3, Whole), (2, Overriding)])
def test_save_weights(ranks, tmp_path, world_size, cls):
    """The library reads whole tables, into a plain module and into a sharded one."""
    from safetensors.torch import load_file, load_model

    [inside, after], *_ = ranks(world_size).run(save_weights, str(tmp_path), world_size, cls)
    for name, expected in (("inside", inside), ("after", after)):
        path = tmp_path / f"{name}.safetensors"
        assert_same({k: load_file(path)[k] for k in expected}, expected)
        model = make_model(seed=9)
        load_model(model, path)
        assert_same(dict(model.state_dict()), expected)
    if world_size == 3:
        ranks(2).run(load_weights, str(tmp_path / "inside.safetensors"))


def load_weights(path: str) -> None:
    from safetensors.torch import load_file

    load = At("on_train_batch_end", lambda _, module: module.load_state_dict(load_file(path)), count=2)
    model = make_model(seed=9)
    make_trainer(make_strategy("embrace"), callbacks=[load]).fit(model, loader(2))
    expected = load_file(path)
    assert_same(dict(model.state_dict()), {k: expected[k] for k in model.state_dict()})


def refuse_weights(folder: str) -> list[str]:
    class Odd(Whole):
        def get_extra_state(self) -> Any:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None: ...

    texts = []

    def save(trainer: Any, _: Any) -> None:
        with pytest.raises(CheckpointError, match="safetensors file cannot hold") as info:
            trainer.strategy.save_weights(f"{folder}/a.safetensors")
        texts.append(str(info.value))
        with pytest.raises(ValueError, match="local files only"):
            trainer.strategy.save_weights("memory://a.safetensors")

    model = make_model(cls=Odd)
    make_trainer(make_strategy("embrace"), callbacks=[At("on_train_batch_end", save, count=1)]).fit(model, loader(1))
    return texts


def test_weights_that_cannot_be_saved(ranks, tmp_path):
    """The same error on every rank, and no file."""
    texts = ranks(2).run(refuse_weights, str(tmp_path))
    assert texts[0] == texts[1] and "_extra_state" in texts[0][0]
    assert list(tmp_path.iterdir()) == []
