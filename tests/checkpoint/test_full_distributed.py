"""Checkpoint files: the ones DDP writes, key by key, and every way of reading them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_embrace.checkpoint.ranks import KEY
from tests.checkpoint.fits import resume, saved_by_both
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
)
from tests.support.models import batches, concatenated

#: name, columns, sparse tables, optimizer, number of ranks (with 2 columns on 3 ranks one owns none)
KINDS = {
    "adam": (5, False, "adam", 2),
    "adagrad-narrow": (2, False, "adagrad", 3),
    "sparse-momentum": (5, True, "momentum", 2),
    "sparse-adam-narrow": (2, True, "sparseadam", 3),
}


def save(strategy: str, folder: str, columns: int, sparse: bool, optimizer: str, world_size: int) -> Any:
    """Two epochs of three steps; checkpoints every two steps, at validation, inside a callback, and after the fit."""
    model = make_model(columns, sparse, optimizer)
    by_step = ModelCheckpoint(folder, "step-{step}", every_n_train_steps=2, save_top_k=-1)
    best = ModelCheckpoint(folder, "best-{epoch}", monitor="val_loss", save_top_k=1, save_last=True)
    weights = ModelCheckpoint(folder, "weights-{epoch}", save_weights_only=True, every_n_epochs=2)
    inside = At("on_train_batch_end", lambda trainer, _: trainer.save_checkpoint(f"{folder}/inside.ckpt"), count=5)
    trainer = make_trainer(
        make_strategy(strategy), world_size, max_epochs=2, callbacks=[by_step, best, weights, inside],
        enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(model, loader(3, 0, world_size), loader(2, 5, world_size))
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    return results(model, trainer)


@pytest.fixture(scope="module")
def files(ranks, tmp_path_factory):
    """By kind: DDP's files, ours, and the results of these runs."""
    parent = tmp_path_factory.mktemp("checkpoints")
    return lambda kind: saved_by_both(save, "embrace", ranks, parent / kind, KINDS[kind])


def load(path: Path, **arguments: Any) -> dict[str, Any]:
    """A checkpoint without the name of its folder, which two runs cannot share."""
    checkpoint = torch.load(path, **{"weights_only": True, **arguments})
    checkpoint.pop(KEY, None)  # what each rank has for itself
    if "callbacks" in checkpoint:
        checkpoint["callbacks"] = moved(checkpoint["callbacks"], str(path.parent))
    return checkpoint


def storages(value: Any) -> list[int]:
    """Sizes of what the dense tensors of a checkpoint lie in."""
    if isinstance(value, torch.Tensor):
        return [] if value.is_sparse else [value.untyped_storage().nbytes()]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [size for item in items for size in storages(item)]


def moved(value: Any, folder: str) -> Any:
    if isinstance(value, str):
        return value.replace(folder, "")
    if isinstance(value, dict):
        return type(value)((moved(k, folder), moved(v, folder)) for k, v in value.items())
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_ddps(files, kind):
    """Same file names; same keys, types, shapes, dtypes, layouts and values in each; no tensor has a larger storage."""
    theirs, ours, _ = files(kind)
    names = sorted(p.name for p in theirs.iterdir())
    assert names == sorted(p.name for p in ours.iterdir())
    assert len(names) >= 7, names
    for name in names:
        loaded = load(ours / name), load(theirs / name)
        assert_same(*loaded, name)
        assert storages(loaded[0]) == storages(loaded[1]), name
        with ZipFile(ours / name) as archive:
            assert archive.testzip() is None, f"{name}: a checksum is wrong"


def test_files_hold_whole_states(files):
    """What the comparison with DDP rests on: full tables, and full states of every kind of optimizer."""
    for kind, (columns, sparse, optimizer, _) in KINDS.items():
        checkpoint = load(files(kind)[1] / "after.ckpt")
        assert checkpoint["state_dict"]["words.weight"].shape == (23, columns)
        states = checkpoint["optimizer_states"][0]["state"]
        name = {"adam": "exp_avg", "adagrad": "sum", "momentum": "momentum_buffer", "sparseadam": "exp_avg_sq"}
        for number in (0, 1):
            state = states[number][name[optimizer]]
            assert state.shape == (23, columns) and state.is_sparse == (optimizer == "momentum" and sparse)


@pytest.mark.parametrize("name", ["step-step=4.ckpt", "last.ckpt"])
@pytest.mark.parametrize("kind", KINDS)
def test_resume(ranks, files, kind, name):
    """Training goes on from our file and from DDP's with equal numbers, in the middle of an epoch and at its end."""
    theirs, ours, _ = files(kind)
    arguments = KINDS[kind]
    expected = ranks(arguments[-1]).run(resume, "ddp", str(theirs / name), *arguments)
    assert len(expected[0][0]["losses"]) > 0
    for strategy, folder in [("embrace", theirs), ("embrace", ours), ("ddp", ours)]:
        got = ranks(arguments[-1]).run(resume, strategy, str(folder / name), *arguments)
        assert_same(got, expected, f"{strategy} from {folder.name}")


def alone(path: Path | None, columns: int, sparse: bool, optimizer: str, world_size: int, epochs: int) -> Any:
    """One process, on the batches of all ranks together."""
    model = make_model(columns, sparse, optimizer, seed=1 if path is None else 77)
    trainer = make_trainer("auto", 1, max_epochs=epochs)
    data = [concatenated(step) for step in batches(3, world_size)]
    trainer.fit(model, DataLoader(data, batch_size=None, shuffle=False), ckpt_path=path)
    return model, trainer


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on(ranks, files, kind):
    """A Trainer with one process resumes from our file and computes what the ranks compute together."""
    _, ours, _ = files(kind)
    arguments = KINDS[kind]
    model, trainer = alone(ours / "last.ckpt", *arguments, epochs=3)
    together, *_ = ranks(arguments[-1]).run(resume, "embrace", str(ours / "last.ckpt"), *arguments)
    assert_same(dict(model.state_dict()), together[0]["state"], tolerance=1e-10)
    optimizers = [plain(o.state_dict()) for o in trainer.optimizers]
    assert_same(optimizers, together[0]["optimizers"], tolerance=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_go_on_from_one_process(ranks, tmp_path, kind):
    """A checkpoint of one process resumes under ``embrace``."""
    arguments = KINDS[kind]
    _, trainer = alone(None, *arguments, epochs=2)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    model, _ = alone(tmp_path / "one.ckpt", *arguments, epochs=3)
    together, *_ = ranks(arguments[-1]).run(resume, "embrace", str(tmp_path / "one.ckpt"), *arguments)
    assert_same(together[0]["state"], dict(model.state_dict()), tolerance=1e-10)


def test_load_from_checkpoint(files):
    """``load_from_checkpoint`` builds the model from its hyperparameters and the full tables."""
    _, ours, (rank0, _) = files("adam")
    for name in ("after.ckpt", "weights-epoch=1.ckpt"):
        model = Whole.load_from_checkpoint(ours / name, weights_only=True)
        assert_same(dict(model.state_dict()), rank0["state"])


def evaluate(strategy: str, path: str, strict: bool) -> Any:
    """Standalone stages read a checkpoint too; ``strict_loading=False`` leaves out what it lacks."""
    model = make_model(seed=77)
    if not strict:
        model.strict_loading = False
        model.extra = torch.nn.Linear(1, 1).double()
        torch.nn.init.ones_(model.extra.weight)
    trainer = make_trainer(make_strategy(strategy))
    metrics = trainer.validate(model, loader(2, 5), ckpt_path=path, verbose=False)
    predictions = trainer.predict(model, loader(2, 5), ckpt_path=path)
    trainer.fit(model, loader(2)) if strict else None
    return metrics, plain(predictions), plain(dict(model.state_dict()))


@pytest.mark.parametrize("strict", [True, False])
def test_evaluate_from_checkpoint(ranks, files, strict):
    """validate and predict with ``ckpt_path`` equal DDP's from its own file."""
    theirs, ours, _ = files("adam")
    expected = ranks(2).run(evaluate, "ddp", str(theirs / "weights-epoch=1.ckpt"), strict)
    assert_same(ranks(2).run(evaluate, "embrace", str(ours / "weights-epoch=1.ckpt"), strict), expected)


class Custom(Whole):
    """Saves what it likes: without the head, under other names, rounded, and with something of its own."""

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        state = super().state_dict(*arguments, **named)
        return {f"backbone.{k}": v.float() for k, v in state.items() if not k.startswith("head")}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["names"] = sorted(checkpoint["state_dict"])
        checkpoint["shapes"] = [tuple(v.shape) for v in checkpoint["state_dict"].values()]


class Reader(Callback):
    """Reads values on every rank, which must not become a collective of some of them."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        for value in [*checkpoint["state_dict"].values(), *checkpoint["optimizer_states"][0]["state"][0].values()]:
            assert not bool(torch.isnan(value).any())
            assert float(value.double().norm()) >= 0
            value.cpu().numpy()
        checkpoint["largest"] = max(float(v.max()) for v in checkpoint["state_dict"].values())


def customised(strategy: str, folder: str) -> None:
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2)
    trainer = make_trainer(make_strategy(strategy), callbacks=[saver, Reader()], enable_checkpointing=True)
    trainer.fit(make_model(cls=Custom), loader(3))


def test_customised_files(ranks, tmp_path):
    """Modules that override ``state_dict`` and callbacks that look into the checkpoint see what they see under DDP."""
    for strategy in ("ddp", "embrace"):
        ranks(2).run(customised, strategy, str(tmp_path / strategy))
    ours, theirs = (load(tmp_path / strategy / "step=2.ckpt") for strategy in ("embrace", "ddp"))
    assert_same(ours, theirs)
    assert "backbone.words.weight" in ours["names"] and (23, 5) in ours["shapes"]


def reload(assign: bool) -> Any:
    """Loads the initial weights again in the middle of training."""
    model = make_model()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    again = At("on_train_batch_end", lambda _, module: module.load_state_dict(start, assign=assign), count=3)
    trainer = make_trainer(make_strategy("embrace"), callbacks=[again])
    trainer.fit(model, loader(3))
    assert_same(dict(model.state_dict()), start)


@pytest.mark.parametrize("assign", [False, True])
def test_load_inside_fit(ranks, assign):
    """Full tables load into shards, and the Parameter that the optimizer holds stays the table's."""
    ranks(2).run(reload, assign)
