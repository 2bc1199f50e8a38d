"""Folders of ``state_dict_type="sharded"``: what they hold, who writes it, and every way of reading them."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_embrace.checkpoint import stored
from lightning_embrace.checkpoint.consolidate import consolidate
from lightning_embrace.checkpoint.stored import read_metadata
from tests.checkpoint.fits import SHARDED, resume, saved_by_both, strategy_of
from tests.checkpoint.folders import ordered
from tests.support.lifecycle import (
    At,
    Whole,
    assert_same,
    loader,
    make_model,
    make_trainer,
    plain,
    results,
    this_rank,
)
from tests.test_construction_distributed import Built

#: name: columns, sparse tables, optimizer, number of ranks (with 2 columns on 3 ranks one owns none)
KINDS = {
    "adam": (5, False, "adam", 2),
    "adagrad-narrow": (2, False, "adagrad", 3),
    "sparse-momentum": (5, True, "momentum", 2),
    "sparse-momentum-narrow": (2, True, "momentum", 3),
    "no-state": (5, False, "sgd", 2),
}
#: those that are always run, and the others
PARAMETERS = [
    pytest.param(kind, marks=[] if kind in ("adam", "sparse-momentum-narrow", "no-state") else pytest.mark.matrix)
    for kind in KINDS
]


def save(strategy: str, folder: str, columns: int, sparse: bool, optimizer: str, world_size: int) -> Any:
    """Two epochs of three steps; checkpoints in the middle of epochs, at their ends, of weights, and after the fit."""
    model = make_model(columns, sparse, optimizer)
    savers = [
        ModelCheckpoint(folder, "step-{step}", every_n_train_steps=2, save_top_k=-1),
        ModelCheckpoint(folder, "best-{epoch}", monitor="val_loss", save_top_k=1, save_last=True),
        ModelCheckpoint(folder, "weights-{epoch}", save_weights_only=True, every_n_epochs=2),
    ]
    trainer = make_trainer(strategy_of(strategy), world_size, max_epochs=2, callbacks=savers, enable_checkpointing=True)
    trainer.fit(model, loader(3, 0, world_size), loader(2, 5, world_size))
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    return results(model, trainer)


@pytest.fixture(scope="module")
def folders(ranks, tmp_path_factory):
    """By kind: DDP's files, our folders, and the results of these runs."""
    parent = tmp_path_factory.mktemp("sharded")
    return lambda kind: saved_by_both(save, "sharded", ranks, parent / kind, KINDS[kind])


def load(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    checkpoint.pop("embrace_ranks", None)
    callbacks = checkpoint.pop("callbacks", {})
    best = [{k: v for k, v in state.items() if k.endswith("score")} for state in callbacks.values()]
    return {**checkpoint, "scores": best}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_consolidated_files_are_ddps(folders, tmp_path, kind):
    """As many checkpoints of the same names; each, made one file, holds DDP's keys, types, shapes and values."""
    theirs, ours, _ = folders(kind)
    names = sorted(p.name for p in theirs.iterdir())
    assert names == sorted(p.name for p in ours.iterdir()) and len(names) >= 6, names
    for name in names:
        consolidate(ours / name, tmp_path / name)
        assert_same(ordered(load(tmp_path / name)), ordered(load(theirs / name)), name)


def test_every_rank_writes_its_part(folders):
    """Columns are in the files of the ranks that have them, everything else is there once, in rank 0's."""
    for kind, owners in {"adam": {0, 1}, "sparse-momentum-narrow": {0, 1}}.items():
        folder = folders(kind)[1] / "last.ckpt"
        files: dict[str, list[str]] = {}
        for index, info in read_metadata(folder).storage_data.items():
            files.setdefault(index.fqn, []).append(info.relative_path)
        for key, places in files.items():
            table = key.endswith(("words.weight", "bags.weight", ".exp_avg", ".exp_avg_sq", ".values"))
            if table and "head" not in key:
                assert sorted(places) == [f"__{rank}_0.distcp" for rank in sorted(owners)], key
            else:
                assert places == ["__0_0.distcp"], key
        assert {p.name for p in folder.glob("*.distcp")} == {f"__{rank}_0.distcp" for rank in owners}


@pytest.mark.parametrize("name", ["step-step=4.ckpt", pytest.param("last.ckpt", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("kind", PARAMETERS)
def test_resume(ranks, folders, kind, name):
    """Training goes on from a folder, whatever the strategy would write itself, as DDP goes on from its file."""
    theirs, ours, _ = folders(kind)
    arguments = KINDS[kind]
    expected = ranks(arguments[-1]).run(resume, "ddp", str(theirs / name), *arguments)
    assert len(expected[0][0]["losses"]) > 0
    for strategy in ("sharded", "embrace"):
        got = ranks(arguments[-1]).run(resume, strategy, str(ours / name), *arguments)
        assert_same(got, expected, strategy)


@pytest.mark.parametrize("kind", ["adam", "sparse-momentum-narrow", "no-state"])
def test_lightning_consolidates(ranks, folders, tmp_path, monkeypatch, kind):
    """Lightning's own command makes a file of it, from which we go on, and DDP where no state is sparse."""
    _, ours, _ = folders(kind)
    file = tmp_path / "file.ckpt"
    monkeypatch.setattr("sys.argv", ["consolidate", str(ours / "last.ckpt"), "--output_file", str(file)])
    runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")
    arguments = KINDS[kind]
    expected = ranks(arguments[-1]).run(resume, "sharded", str(ours / "last.ckpt"), *arguments)
    assert_same(ranks(arguments[-1]).run(resume, "embrace", str(file), *arguments), expected)
    if "sparse" not in kind:
        assert_same(ranks(arguments[-1]).run(resume, "ddp", str(file), *arguments), expected)


@pytest.mark.horovod
def test_over_horovod(ranks, folders, tmp_path):
    """What carries the exchanges of training has nothing to do with what is written."""
    _, ours, expected = folders("adam")
    assert_same(ranks(2).run(save, "horovod", str(tmp_path), *KINDS["adam"]), expected)
    wanted = ranks(2).run(resume, "sharded", str(ours / "last.ckpt"), *KINDS["adam"])
    assert_same(ranks(2).run(resume, "horovod", str(tmp_path / "last.ckpt"), *KINDS["adam"]), wanted)


def evaluate(strategy: str, path: str, strict: bool) -> Any:
    """Standalone stages read a checkpoint too; ``strict_loading=False`` leaves out what it lacks."""
    model = make_model(seed=77)
    if not strict:
        model.strict_loading = False
        model.extra = torch.nn.Linear(1, 1).double()
        torch.nn.init.ones_(model.extra.weight)
    trainer = make_trainer(strategy_of(strategy))
    metrics = trainer.validate(model, loader(2, 5), ckpt_path=path, verbose=False)
    return metrics, plain(trainer.predict(model, loader(2, 5), ckpt_path=path)), plain(dict(model.state_dict()))


@pytest.mark.parametrize("strict", [True, False])
def test_evaluate_from_checkpoint(ranks, folders, strict):
    """validate and predict with ``ckpt_path`` equal DDP's from its own file; of weights alone as well."""
    theirs, ours, _ = folders("adam")
    expected = ranks(2).run(evaluate, "ddp", str(theirs / "weights-epoch=1.ckpt"), strict)
    assert_same(ranks(2).run(evaluate, "sharded", str(ours / "weights-epoch=1.ckpt"), strict), expected)


class Local(Whole):
    """Ranks have different buffers, as batch statistics are; what `state_dict` shows is noted."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.steps.fill_(10 + this_rank())
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        words = checkpoint["state_dict"]["words.weight"]
        assert isinstance(words, DTensor) and words.shape == (23, 5)
        checkpoint["model"] = {"mine": 1}


def save_local(folder: str) -> None:
    at = At("on_train_batch_end", lambda trainer, _: trainer.save_checkpoint(f"{folder}/x.ckpt"), count=2)
    make_trainer(SHARDED(), callbacks=[at]).fit(make_model(cls=Local), loader(2))


def test_buffers_are_rank_0s(ranks, tmp_path):
    """As under DDP. A hook may put its own things under the name under which Lightning looks for the weights."""
    ranks(2).run(save_local, str(tmp_path))
    consolidate(tmp_path / "x.ckpt", tmp_path / "file.ckpt")
    checkpoint = torch.load(tmp_path / "file.ckpt", weights_only=True)
    assert int(checkpoint["state_dict"]["steps"]) == 10
    assert checkpoint["model"] == {"mine": 1} and checkpoint["state_dict"]["words.weight"].shape == (23, 5)


def save_in_blocks(folder: str) -> Any:
    stored.BLOCK_BYTES, usual = 8 * 3 * 4, stored.BLOCK_BYTES
    try:
        return save("sharded", folder, *KINDS["adam"])
    finally:
        stored.BLOCK_BYTES = usual


def test_large_tables_are_stored_in_blocks(ranks, folders, tmp_path):
    """A reader holds one stored block beside its own columns; here a block has four rows of three columns."""
    ranks(2).run(save_in_blocks, str(tmp_path))
    metadata = read_metadata(tmp_path / "last.ckpt")
    sizes = [tuple(chunk.sizes) for chunk in metadata.state_dict_metadata["model.words.weight"].chunks]
    assert sorted(sizes) == sorted([(4, 3)] * 5 + [(3, 3)] + [(6, 2)] * 3 + [(5, 2)])
    consolidate(tmp_path / "last.ckpt", tmp_path / "file.ckpt")
    theirs = folders("adam")[0] / "last.ckpt"
    assert_same(ordered(load(tmp_path / "file.ckpt")), ordered(load(theirs)))


def save_last(folder: str, link: bool) -> Any:
    """Saves to the same name every epoch, keeps one best, and goes on from the last."""
    saver = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=1, save_last="link" if link else True)
    for epochs in (3, 4):
        model = make_model()
        trainer = make_trainer(SHARDED(), callbacks=[saver], max_epochs=epochs, enable_checkpointing=True)
        trainer.fit(model, loader(2), loader(2, 5), ckpt_path=None if epochs == 3 else "last")
    return results(model, trainer), trainer.global_step


@pytest.mark.parametrize("link", [False, True])
def test_the_same_name_again(ranks, tmp_path, link):
    """Old folders are replaced and removed, and nothing else is left."""
    (result, steps), _ = ranks(2).run(save_last, str(tmp_path), link)
    assert steps == 8 and len(result["losses"]) == 2
    names = sorted(p.name for p in tmp_path.iterdir())
    assert len(names) == 2 and names[1] == "last.ckpt" and names[0].startswith("epoch="), names
    consolidate(tmp_path / "last.ckpt", tmp_path / "file.ckpt")
    assert load(tmp_path / "file.ckpt")["global_step"] == 8


AVERAGES: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.5),
    "swa": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2),
}


def average(strategies: tuple[str, str], kind: str, folder: str, file: str | None = None) -> Any:
    """Saves in the second of three epochs under one strategy, and goes on under another."""
    path = f"{folder}/{strategies[0]}-{kind}.ckpt"
    if file is None:
        at = At("on_train_batch_end", lambda trainer, _: trainer.save_checkpoint(path), count=6)
        trainer = make_trainer(strategy_of(strategies[0]), callbacks=[AVERAGES[kind](), at], max_epochs=3)
        trainer.fit(make_model(), loader(4), loader(2, 5))
    again = make_model(seed=2)
    trainer = make_trainer(strategy_of(strategies[1]), callbacks=[AVERAGES[kind]()], max_epochs=3)
    trainer.fit(again, loader(4), loader(2, 5), ckpt_path=file or path, weights_only=False)
    return results(again, trainer)


@pytest.mark.parametrize("kind", AVERAGES)
def test_averages(ranks, tmp_path, kind):
    """Averages of tables are written by all ranks and read again, also by DDP after consolidation."""
    expected = ranks(2).run(average, ("ddp", "ddp"), kind, str(tmp_path))
    for pair in (("sharded", "sharded"), ("sharded", "embrace"), ("ddp", "sharded")):
        assert_same(ranks(2).run(average, pair, kind, str(tmp_path)), expected, str(pair), tolerance=1e-10)
    file = tmp_path / "file.ckpt"
    consolidate(tmp_path / f"sharded-{kind}.ckpt", file, weights_only=False)
    got = ranks(2).run(average, ("sharded", "ddp"), kind, str(tmp_path), str(file))
    assert_same(got, expected, "consolidated", tolerance=1e-10)


def find_rate(strategy: str, folder: str) -> Any:
    model = make_model()
    model.lr = 0.01
    trainer = make_trainer(strategy_of(strategy), max_epochs=1, default_root_dir=folder)
    finder = Tuner(trainer).lr_find(model, loader(6), num_training=5)
    trainer.fit(model, loader(3))
    return finder.results, results(model, trainer)["losses"]


def test_learning_rate_finder(ranks, tmp_path):
    """It saves, trains, and goes back to what it has saved inside a fit; it leaves nothing behind."""
    expected = ranks(2).run(find_rate, "embrace", str(tmp_path))
    assert_same(ranks(2).run(find_rate, "sharded", str(tmp_path)), expected)
    assert list(tmp_path.iterdir()) == []


def refuse(what: str, folder: str) -> None:
    path, saver, plugins = f"{folder}/x.ckpt", ModelCheckpoint(folder), []
    arguments: dict[str, Any] = {}
    if what == "plugin":
        plugins = [AsyncCheckpointIO()]
    elif what == "elsewhere":
        saver = ModelCheckpoint("memory://folder")
    elif what == "options":
        arguments = {"storage_options": {"a": 1}}
    at = At("on_train_batch_end", lambda trainer, _: trainer.save_checkpoint(path, **arguments), count=2)
    trainer = make_trainer(SHARDED(), callbacks=[saver, at], plugins=plugins, enable_checkpointing=True)
    trainer.fit(make_model(), loader(4))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("plugin", "and the plugin AsyncCheckpointIO"),
        ("elsewhere", "is not on one. Give ModelCheckpoint(dirpath=...) a path"),
        ("options", "storage_options=...) is for a CheckpointIO"),
    ],
)
def test_refused(ranks, tmp_path, what, said):
    """On every rank, and nothing is written."""
    for ok, text in ranks(2).try_run(refuse, what, str(tmp_path)):
        assert not ok and said in text, text
    assert not (tmp_path / "x.ckpt").exists()


def go_on_built(path: str, world_size: int) -> Any:
    """Loads into columns, notes which tensors of the whole size were made on the way, and trains."""
    model, made = make_model(cls=Built), []
    empty = torch.empty

    def noted(*size: Any, **named: Any) -> Tensor:
        tensor = empty(*size, **named)
        if tuple(tensor.shape) == (23, 5) and not tensor.is_meta:
            made.append(tensor.shape)
        return tensor

    trainer = make_trainer(SHARDED(), world_size, max_epochs=3)
    trainer.strategy.load_checkpoint = _with(noted, trainer.strategy.load_checkpoint)  # type: ignore[method-assign]
    trainer.fit(model, loader(3, 0, world_size), loader(2, 5, world_size), ckpt_path=path)
    trainer.save_checkpoint(path + ".built")
    state = trainer.strategy.full_state_dict()
    return plain(dict(state)), model.losses, made


def _with(noted: Any, call: Any) -> Any:
    def inside(*arguments: Any, **named: Any) -> Any:
        torch.empty, usual = noted, torch.empty
        try:
            return call(*arguments, **named)
        finally:
            torch.empty = usual

    return inside


def test_columns_are_read_into_columns(ranks, folders, tmp_path):
    """Of tables that are built in ``configure_model`` no rank makes room for a whole; a fit goes on and saves again."""
    theirs, ours, _ = folders("adam")
    expected = ranks(2).run(resume, "ddp", str(theirs / "last.ckpt"), *KINDS["adam"])
    copy = shutil.copytree(ours / "last.ckpt", tmp_path / "last.ckpt")
    for (state, losses, made), (wanted, *_) in zip(ranks(2).run(go_on_built, str(copy), 2), expected):
        assert made == []
        assert_same(state, wanted["state"], tolerance=1e-10)
        assert_same(losses, wanted["losses"], tolerance=1e-10)
    consolidate(f"{copy}.built", tmp_path / "file.ckpt")
    checkpoint = load(tmp_path / "file.ckpt")
    assert_same(ordered(dict(checkpoint["state_dict"])), ordered(expected[0][0]["state"]), tolerance=1e-10)
    assert_same(plain(checkpoint["optimizer_states"]), expected[0][0]["optimizers"], tolerance=1e-10)
