"""Tables that are built in ``configure_model`` are built as columns: DDP's numbers, and no rank ever holds a whole."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_embrace import EmbRaceStrategy
from lightning_embrace.checkpoint.agreement import CheckpointError
from lightning_embrace.checkpoint.ranks import KEY
from lightning_embrace.tables.parked import is_parked
from tests.support.lifecycle import At, Whole, assert_same, loader, make_strategy, make_trainer, plain, this_rank
from tests.support.models import VOCABULARY
from tests.support.ranks import free_port, run_by_hand
from tests.support.training import QUIET

TABLES = ("words", "bags")


class Built(Whole):
    """The life cycle's model, made in ``configure_model``; initialised over again, as language models do it."""

    def __init__(self, columns: int = 5, sparse: bool = False, optimizer: str = "adam", others: bool = False) -> None:
        super(Whole, self).__init__()
        self.save_hyperparameters()
        self.head = None
        self.losses: list[float] = []
        self.evaluated: list[float] = []

    def configure_model(self) -> None:
        if self.head is not None:
            return
        columns, sparse = self.hparams["columns"], self.hparams["sparse"]
        self.words = nn.Embedding(VOCABULARY, columns, sparse=sparse, padding_idx=0)
        self.bags = nn.EmbeddingBag(VOCABULARY, columns, sparse=sparse, mode="mean")
        self.head = nn.Linear(columns, 1)
        self.head.requires_grad_(self.hparams["optimizer"] != "sparseadam")
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if self.hparams["others"]:
            # what turns out not to be sharded, and what is never built as columns
            self.tied, self.out = nn.Embedding(VOCABULARY, columns), nn.Linear(columns, VOCABULARY, bias=False)
            self.out.weight = self.tied.weight
            self.excluded = nn.Embedding(VOCABULARY, columns)
            self.bounded = nn.Embedding(VOCABULARY, columns, max_norm=1.0)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                module.weight.data.normal_(mean=0.0, std=0.5)
                if module.padding_idx is not None:
                    module.weight.data[module.padding_idx].zero_()
        nn.init.trunc_normal_(self.bags.weight, std=0.5, a=-0.5, b=0.5)  # draws again until all ranks have enough
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).mean(1) + self.bags(ids)
        if self.hparams["others"]:
            x = x + self.out(self.tied(ids).mean(1)).mean(1, True)
            x = x + self.excluded(ids).sum(1) + self.bounded(ids).sum(1)
        return self.head(torch.tanh(x)).squeeze(1)


def make(seed: int = 1, **arguments: Any) -> Built:
    seed_everything(seed, verbose=False)
    return Built(**arguments)


def whole(trainer: Any, model: Any) -> dict[str, Tensor]:
    """The state dict with whole tables, on every rank."""
    strategy = trainer.strategy
    state = strategy.full_state_dict() if isinstance(strategy, EmbRaceStrategy) else model.state_dict()
    return plain(dict(state))


def outcome(model: Any, trainer: Any) -> dict[str, Any]:
    return {
        "state": whole(trainer, model),
        "losses": model.losses,
        "evaluated": model.evaluated,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
    }


def fit(strategy: str, world_size: int, seeds: str = "equal", folder: str | None = None, **arguments: Any) -> Any:
    """Two epochs; with a folder, checkpoints in it, one of them after the fit."""
    model = make(seed=1 if seeds == "equal" else 1 + this_rank(), **arguments)
    saver = [ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)] if folder else []
    patterns = ["*", "!excluded"] if arguments.get("others") else ["*"]
    trainer = make_trainer(
        make_strategy(strategy, tables=patterns),
        world_size,
        max_epochs=2,
        callbacks=saver,
        enable_checkpointing=bool(folder),
    )
    trainer.fit(model, loader(3, 0, world_size), loader(2, 5, world_size))
    if folder:
        trainer.save_checkpoint(f"{folder}/after.ckpt")
    return outcome(model, trainer)


@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        (2, {}),
        (2, {"sparse": True, "optimizer": "adagrad"}),
        (3, {"columns": 2, "sparse": True, "optimizer": "sparseadam"}),
        (2, {"others": True, "optimizer": "sgd"}),
        (2, {"seeds": "by rank"}),
    ],
)
def test_equals_ddp(ranks, world_size, arguments):
    """Initial numbers and trained ones; also for tables that only turn out not to be sharded when all is built, with
    fewer columns than ranks, and with ranks that are seeded differently, where rank 0's numbers count."""
    expected = ranks(world_size).run(fit, "ddp", world_size, **arguments)
    assert_same(ranks(world_size).run(fit, "embrace", world_size, **arguments), expected)


def look(folder: str) -> Any:
    """What a rank sees of a table while the model is built, in training, and afterwards; and a second fit."""
    seen: dict[str, Any] = {}
    strategy = make_strategy("embrace")
    model = make()
    at = At("on_train_batch_end", lambda _, m: tuple(m.words._parameters["weight"].shape), count=2)
    trainer = make_trainer(strategy, callbacks=[at])
    trainer.fit(model, loader(3))
    weight = model.words.weight
    seen["shapes"] = [at.results[0], tuple(weight.shape), type(weight) is nn.Parameter, is_parked(model.words)]
    shown = model.state_dict()["words.weight"]
    assert isinstance(shown, DTensor) and shown.shape == (VOCABULARY, 5)
    assert torch.equal(shown.to_local(), weight)
    state = trainer.optimizers[0].state[weight]
    assert state["exp_avg"].shape == weight.shape
    with pytest.raises(RuntimeError, match="made outside of the Trainer"):
        model.words(torch.tensor([1]))
    first = whole(trainer, model)
    assert is_parked(model.words) and model.words.weight is weight
    # goes on where it was
    trainer = make_trainer(make_strategy("embrace"))
    trainer.fit(model, loader(3, 3))
    seen["first"], seen["second"] = first, whole(trainer, model)
    return seen


def twice(strategy: str) -> Any:
    model = make()
    make_trainer(strategy).fit(model, loader(3))
    first = plain(dict(model.state_dict()))
    trainer = make_trainer(strategy)
    trainer.fit(model, loader(3, 3))
    return first, plain(dict(model.state_dict()))


def test_what_the_user_sees(ranks, tmp_path):
    """A weight is this rank's columns in training and after it, optimizer states too; the whole can be had; a model
    that stayed sharded is trained again."""
    seen = ranks(2).run(look, str(tmp_path))
    expected = ranks(2).run(twice, "ddp")
    for rank, width in enumerate((3, 2)):
        assert seen[rank]["shapes"] == [(VOCABULARY, width), (VOCABULARY, width), True, True]
        assert_same((seen[rank]["first"], seen[rank]["second"]), expected[rank])


def load(path: Path) -> Any:
    checkpoint = torch.load(path, weights_only=True)
    checkpoint.pop(KEY, None)  # what each rank has for itself
    checkpoint.pop("callbacks", None)  # they name the folder
    return checkpoint


def resume(strategy: str, path: str, **arguments: Any) -> Any:
    """Goes on from a file, which is emptied when training has begun: nothing may still be read from it."""
    empty = At("on_train_start", lambda *_: Path(path).write_bytes(b"") if this_rank() == 0 else None)
    model = make(seed=77, **arguments)
    trainer = make_trainer(make_strategy(strategy), max_epochs=3, callbacks=[empty])
    trainer.fit(model, loader(3), loader(2, 5), ckpt_path=path, weights_only=True)
    return outcome(model, trainer)


def evaluate(strategy: str, path: str) -> Any:
    """Standalone stages, before any fit: from initial numbers and from a file; unequal numbers of batches."""
    model = make(seed=3)
    trainer = make_trainer(make_strategy(strategy))
    fresh = trainer.validate(model, loader(2, 5), verbose=False)
    read = trainer.test(model, loader(2, 5), ckpt_path=path, verbose=False)
    predictions = trainer.predict(model, loader(3 - this_rank(), 7))
    if strategy == "embrace":
        assert is_parked(model.words) and model.words.weight.shape[1] < 5
    trainer = make_trainer(make_strategy(strategy))
    trainer.fit(model, loader(3))
    return fresh, read, plain(predictions), outcome(model, trainer)


@pytest.mark.parametrize("arguments", [{}, {"sparse": True, "optimizer": "momentum"}], ids=["adam", "sparse-momentum"])
def test_checkpoints(ranks, tmp_path, arguments):
    """Files are DDP's, from inside the fit and from after it, and are read both ways, by every stage."""
    folders = {strategy: tmp_path / strategy for strategy in ("ddp", "embrace")}
    for strategy, folder in folders.items():
        ranks(2).run(fit, strategy, 2, folder=str(folder), **arguments)
    names = sorted(p.name for p in folders["ddp"].iterdir())
    assert names == sorted(p.name for p in folders["embrace"].iterdir()) and "after.ckpt" in names
    for name in names:
        assert_same(load(folders["embrace"] / name), load(folders["ddp"] / name), name)
    resumed = []
    for strategy, folder in (("ddp", "ddp"), ("embrace", "ddp"), ("embrace", "embrace"), ("ddp", "embrace")):
        copied = shutil.copy(folders[folder] / "step=4.ckpt", tmp_path / "copy.ckpt")
        resumed.append(ranks(2).run(resume, strategy, str(copied), **arguments))
        assert_same(resumed[-1], resumed[0], f"{strategy} from {folder}")
    if not arguments:
        path = str(folders["embrace"] / "after.ckpt")
        assert_same(ranks(2).run(evaluate, "embrace", path), ranks(2).run(evaluate, "ddp", path))


def scarce() -> int:
    """Rank 0 could hold a little more than the weights, the other one everything."""
    return 2000 if this_rank() == 0 else 1 << 40


class Reader(Callback):
    """Wants values in a checkpoint, so that whole tables must be there."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["sum"] = float(checkpoint["state_dict"]["words.weight"].sum())


def refuse_saving(folder: str) -> None:
    """Before training, where a callback would save; else where a save is asked for. Training does not suffer."""
    model = make()
    save = f"{folder}/full.ckpt"

    def try_to_save(trainer: Any, _: Any = None) -> str:
        with pytest.raises(ValueError, match=r"state_dict_type='sharded'") as info:
            trainer.save_checkpoint(save)
        return str(info.value)

    with (
        patch("lightning_embrace.construction.available_bytes", scarce),
        patch("lightning_embrace.shards.available_bytes", scarce),
    ):
        callbacks = [ModelCheckpoint(folder), Reader()]
        trainer = make_trainer(make_strategy("embrace"), callbacks=callbacks, enable_checkpointing=True)
        with pytest.raises(ValueError, match="as ModelCheckpoint does since `on_save_checkpoint` of Reader") as info:
            trainer.fit(model, loader(3))
        # two tables of 920 bytes, each with two states of Adam's
        assert "takes 5.52 kB, and 2 kB of memory are left" in str(info.value)
        assert "EmbRaceStrategy(state_dict_type='sharded') writes a folder" in str(info.value)
        assert is_parked(model.words)
        weights = ModelCheckpoint(folder, "weights", save_weights_only=True)
        at = At("on_train_batch_end", try_to_save, count=2)
        trainer = make_trainer(
            make_strategy("embrace"), callbacks=[weights, at, Reader()], enable_checkpointing=True, max_epochs=1
        )
        trainer.fit(model, loader(3))
        assert "the optimizer's whole states on rank 0 takes 3.68 kB" in at.results[0]
        assert "the optimizer's whole states on rank 0 takes 3.68 kB" in try_to_save(trainer)
    assert not os.path.exists(save) and os.path.exists(f"{folder}/weights.ckpt")
    trainer.save_checkpoint(save)
    assert os.path.exists(save)


def test_full_saves_that_do_not_fit(ranks, tmp_path):
    """Refused on every rank alike, though only rank 0 lacks the memory; the message names the cure."""
    ranks(2).run(refuse_saving, str(tmp_path))


def save_without_room(folder: str) -> Any:
    """Rank 0 has no room for any table; nobody wants values before the files are written."""
    model = make()
    with (
        patch("lightning_embrace.construction.available_bytes", lambda: 0),
        patch("lightning_embrace.shards.available_bytes", lambda: 0),
    ):
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = make_trainer(make_strategy("embrace"), callbacks=[saver], enable_checkpointing=True)
        trainer.fit(model, loader(3))
        trainer.save_checkpoint(f"{folder}/after.ckpt")
        trainer.strategy.save_weights(f"{folder}/after.safetensors")
    return whole(trainer, model)


def test_full_saves_need_no_room(ranks, tmp_path):
    """Whole files of tables that fit no rank, in a fit and after it."""
    state, _ = ranks(2).run(save_without_room, str(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {"step=2.ckpt", "after.ckpt", "after.safetensors"}
    assert_same(dict(load(tmp_path / "after.ckpt")["state_dict"]), state)
    assert load_file(tmp_path / "after.safetensors").keys() == state.keys()


def fail_after_fit(folder: str) -> None:
    """A write that fails when the fit is over, and one that does not."""
    model = make()
    trainer = make_trainer(make_strategy("embrace"))
    trainer.fit(model, loader(2))
    with pytest.raises(CheckpointError, match=r"rank 0.*(Not a directory|File exists)"):
        trainer.save_checkpoint(f"{folder}/file/a.ckpt")
    trainer.save_checkpoint(f"{folder}/a.ckpt")
    assert is_parked(model.words)


def test_a_save_that_fails_after_the_fit(ranks, tmp_path):
    """One error on every rank, and the columns are still there."""
    (tmp_path / "file").write_bytes(b"")
    ranks(2).run(fail_after_fit, str(tmp_path))
    assert "words.weight" in load(tmp_path / "a.ckpt")["state_dict"]


def save_shards(folder: str) -> Any:
    """torch.distributed.checkpoint on what `state_dict` shows, in the middle of a fit, and back."""
    model = make()
    first = At("on_train_batch_end", lambda _, m: dcp.save(m.state_dict(), checkpoint_id=folder), count=2)
    second = At("on_train_batch_end", lambda _, m: _load(m, folder), count=4)
    trainer = make_trainer(make_strategy("embrace"), callbacks=[first, second], max_epochs=1)
    states: list[Any] = []
    keep = At("on_train_batch_end", lambda t, m: states.append(whole(t, m)))
    trainer.callbacks.append(keep)
    trainer.fit(model, loader(5))
    assert_same(states[3], states[1])
    assert not torch.equal(states[2]["words.weight"], states[1]["words.weight"])
    model = make(seed=9)
    trainer = make_trainer(make_strategy("embrace"))
    trainer.validate(model, loader(1), verbose=False)
    _load(model, folder)
    assert_same(whole(trainer, model), states[1])


def _load(model: Any, folder: str) -> None:
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)


def test_saving_shards(ranks, tmp_path):
    """What `state_dict` shows on a rank can be saved by itself, and a new model goes on from there."""
    ranks(2).run(save_shards, str(tmp_path))


def fail(stage: str) -> str:
    model = make()
    model.training_step = lambda *_: 1 / 0  # type: ignore[method-assign]
    model.predict_step = lambda *_: 1 / 0  # type: ignore[method-assign]
    if stage == "setup":
        model.configure_optimizers = lambda: 1 / 0  # type: ignore[method-assign]
    trainer = make_trainer(make_strategy("embrace"))
    with pytest.raises(ZeroDivisionError):
        trainer.predict(model, loader(3)) if stage == "predict" else trainer.fit(model, loader(3))
    del model.training_step, model.predict_step
    model.__dict__.pop("configure_optimizers", None)
    try:
        make_trainer(make_strategy("embrace")).fit(model, loader(3))
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(("stage", "said"), [("setup", "trained"), ("predict", "trained"), ("fit", "still sharded")])
def test_after_a_failure(ranks, stage, said):
    """Where no step was begun the columns are good; a fit that failed leaves a model that is refused."""
    for result in ranks(2).run(fail, stage):
        assert said in result


def build_alone() -> None:
    """One rank, and ranks that end with the run, build whole tables."""
    model = make()
    trainer = make_trainer(make_strategy("embrace"), 1)
    trainer.fit(model, loader(3, 0, 1))
    assert type(model.words) is nn.Embedding and model.words.weight.shape == (VOCABULARY, 5)


def test_one_rank(ranks):
    """Nothing is gained there, and the model is an ordinary one afterwards."""
    ranks(1).run(build_alone)


LIMIT = 512 << 20
COLUMNS = 64
ROWS = int(0.6 * LIMIT) // (COLUMNS * 4)


class Large(LightningModule):
    """A table of 60 % of the limit."""

    def __init__(self) -> None:
        super().__init__()
        self.table = None

    def configure_model(self) -> None:
        if self.table is None:
            self.table = nn.Embedding(ROWS, COLUMNS)
            self.head = nn.Linear(COLUMNS, 1)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.table(ids)).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_under_limit(strategy: Any) -> Any:
    """Takes the limit for what this process will allocate from now on, on top of what imports have."""
    with open("/proc/self/status") as lines:
        used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + LIMIT, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    seed_everything(0, verbose=False)
    model = Large()
    batches = [torch.arange(8) * 1000 + step for step in range(3)]
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, **QUIET)
    try:
        trainer.fit(model, DataLoader(batches, batch_size=None))
    except RuntimeError as error:
        return str(error)
    return tuple(model.table.weight.shape), trainer.global_step


def environments() -> list[dict[str, str]]:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    return [{**common, "LOCAL_RANK": str(rank)} for rank in range(2)]


def test_a_table_that_does_not_fit(ranks):
    """Each rank may take 512 MiB: a table of 307 MiB trains under ``embrace``, and under ``ddp`` its gradient finds no
    room any more."""
    results = run_by_hand(environments(), train_under_limit, "embrace")
    assert results == [((ROWS, 32), 3)] * 2
    for said in run_by_hand(environments(), train_under_limit, "ddp"):
        assert isinstance(said, str) and "memory" in said, said
