"""Checkpoints are plain training's, whoever writes them and whoever goes on from them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision

from lightning_embrace import CheckpointError
from lightning_embrace.checkpoint.ranks import KEY
from lightning_embrace.hydra import saving
from tests.hydra import peak, zoo
from tests.hydra.runs import QUIET, Run, assert_same, hydra

BATCHES, AMID = 8, 5


class Loader:
    """Goes on behind the batch at which it was saved."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data
        self.position = self.start = 0

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for position in range(start, len(self.data)):
            self.position = position + 1
            yield self.data[position]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"] % len(self.data)


class Case(NamedTuple):
    """A model, the device's budget, and the Trainer's arguments, made anew for each run."""

    make: Callable[[], Any]
    device: str = "120KiB"
    arguments: Callable[[], dict[str, Any]] = dict


def stack(kind: Any, **settings: Any) -> Callable[[], Any]:
    return partial(zoo.Stack, lambda parameters: kind(parameters, **settings))


class Strided(zoo.Tied):
    """Tied weights, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
        weight = self.blocks[3][0].weight
        weight.data = weight.data.t().contiguous().t()


def half() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2, growth_factor=8.0)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


CASES = {
    "adamw": Case(stack(torch.optim.AdamW, lr=0.01)),
    "momentum": Case(stack(torch.optim.SGD, lr=0.05, momentum=0.9), "80KiB"),
    "adagrad": Case(stack(torch.optim.Adagrad, lr=0.05), "100KiB"),
    "groups and scheduler": Case(zoo.Grouped),
    "half": Case(stack(torch.optim.AdamW, lr=0.01), "120KiB", half),
    "clip": Case(stack(torch.optim.AdamW, lr=0.01), "120KiB", lambda: {"gradient_clip_val": 0.5}),
    "tied, strided": Case(Strided, "150KiB"),
}


def fit(
    case: Case, strategy: Any, from_: str | None = None, into: Path | None = None, extra: Any = (), **arguments: Any
) -> Run:
    """Two epochs, or the rest of them."""
    seed_everything(3, verbose=False)
    model = case.make()
    callbacks = list(extra)
    if into is not None:
        at = {"dirpath": into, "save_top_k": -1}
        amid = ModelCheckpoint(filename="{step}", every_n_train_steps=AMID, **at)
        callbacks += [amid, ModelCheckpoint(filename="end-{epoch}", save_on_train_epoch_end=True, **at)]
    settings = {**QUIET, **case.arguments(), "max_epochs": 2, "strategy": strategy, "callbacks": callbacks}
    trainer = Trainer(**{**settings, "enable_checkpointing": into is not None, **arguments})
    trainer.fit(model, Loader(zoo.batches(BATCHES)), ckpt_path=from_)
    states = [o.state_dict() for o in trainer.optimizers]
    return Run([float(x) for x in model.losses], dict(model.state_dict()), states, trainer)


def rest_of(whole: Run, steps: int) -> Run:
    return whole._replace(losses=whole.losses[steps:])


def check_both_ways(name: str, folder: Path, tier: dict[str, Any]) -> None:
    """Amid an epoch and at its end: plain → hydra, hydra → plain, hydra → hydra."""
    case = CASES[name]
    ours = partial(hydra, device_memory=case.device, **tier)
    whole = fit(case, "auto", into=folder / "plain")
    strategy = ours()
    assert_same(fit(case, strategy, into=folder / "ours"), whole)
    assert strategy.planned.plan.shards, "everything stayed on the device: nothing was shown"
    files = {AMID: f"step={AMID}.ckpt", BATCHES: "end-epoch=0.ckpt"}
    for steps, file in files.items():
        for source, goes_on in (("plain", ours), ("ours", lambda: "auto"), ("ours", ours)):
            run = fit(case, goes_on(), from_=str(folder / source / file))
            assert_same(run, rest_of(whole, steps))
        same_files(folder / "ours" / file, folder / "plain" / file)


def same_files(ours: Path, plain: Path) -> None:
    """The same records of the same sizes, checksums and places, but for pickles, in which paths differ."""
    seen = []
    for path in (ours, plain):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            seen.append({i.filename: (i.file_size, i.CRC) for i in archive.infolist() if "/data/" in i.filename})
    # ours has the states of generators behind all else
    assert len(seen[1]) > 10 and seen[1].items() <= seen[0].items()
    mine, other = (torch.load(path, weights_only=True) for path in (ours, plain))
    assert mine.keys() == {*other, KEY}
    for key, value in other["state_dict"].items():
        assert mine["state_dict"][key].stride() == value.stride()


@pytest.mark.parametrize(("name", "tier"), [("adamw", "disk"), ("groups and scheduler", "host"), ("half", "host")])
def test_going_on(name: str, tier: str, tmp_path: Path) -> None:
    """The continued run is the uninterrupted one, bit by bit, and files are those of plain training."""
    check_both_ways(name, tmp_path, {"disk": tmp_path / "disk", "host_memory": "4KiB"} if tier == "disk" else {})


@pytest.mark.matrix
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("name", CASES)
def test_going_on_everywhere(name: str, tier: str, prefetch: bool, tmp_path: Path) -> None:
    """The full product."""
    folder = {"disk": tmp_path / "disk", "host_memory": "4KiB"} if tier == "disk" else {}
    check_both_ways(name, tmp_path, {"prefetch": prefetch, **folder})


def test_tied_and_strided(tmp_path: Path) -> None:
    """What shares a storage is one in the file, and lies in it as it did in memory."""
    case = CASES["tied, strided"]
    for folder, strategy in (("ours", hydra(device_memory=case.device)), ("plain", "auto")):
        fit(case, strategy, into=tmp_path / folder, max_epochs=1)
    same_files(tmp_path / "ours" / f"step={AMID}.ckpt", tmp_path / "plain" / f"step={AMID}.ckpt")


MODES = ["file", *(pytest.param(mode, marks=pytest.mark.matrix) for mode in ("folder", "read", "load"))]


@pytest.mark.parametrize("mode", MODES)
def test_peak_memory(mode: str, tmp_path: Path) -> None:
    """Less than a shard is held while a checkpoint is written; all of it where somebody is given it, as a control.

    While one is loaded, what is copied of one block and its copy.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # what was freed is not there to be reused
    command = [sys.executable, "-m", "tests.hydra.peak", str(tmp_path), mode]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    taken = found["taken"]
    assert found["written"] > peak.BLOCKS * peak.SHARD_BYTES and found["spilled"] >= 3
    if mode == "read":
        assert taken["saving"] > 0.9 * found["spilled"] * peak.SHARD_BYTES
    elif mode == "load":
        assert set(taken) == {"weights", "states"} and max(taken.values()) < 1.3 * peak.SHARD_BYTES, taken
    else:
        assert taken["saving"] < peak.SHARD_BYTES


class Hooked(zoo.Stack):
    """Is given its checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["sum"] = sum(float(v.double().sum()) for v in state.values())
        state["blocks.3.0.bias"] = state["blocks.3.0.bias"] * 2


class Overridden(zoo.Stack):
    """Has a state dict of its own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {k: v + 0 for k, v in super().state_dict(*args, **kwargs).items()}


class WithHook(zoo.Stack):
    """A block of it has a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2]._register_state_dict_hook(
            lambda m, state, prefix, _: state.update({f"{prefix}0.bias": state[f"{prefix}0.bias"] * 2})
        )


@pytest.mark.parametrize(
    ("make", "plugins", "who"),
    [
        (Hooked, [], None),
        (Overridden, [], r"`state_dict` of Overridden"),
        (WithHook, [], r"a hook on the state dict of blocks\.2"),
        (zoo.Stack, [AsyncCheckpointIO], "AsyncCheckpointIO"),
        (partial(zoo.Stack, make=zoo.spectral_norm), [], None),
    ],
)
def test_who_is_given_values(
    make: Any, plugins: list[Any], who: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Has true ones, which is said once; what it makes of them is in the file, as in plain training."""
    read = []
    for folder, strategy in (("ours", hydra(device_memory="80KiB")), ("plain", "auto")):
        case = Case(make, arguments=lambda: {"plugins": [p() for p in plugins]})
        with caplog.at_level("INFO"):
            fit(case, strategy, into=tmp_path / folder, max_epochs=2)
        read.append(torch.load(tmp_path / folder / f"step={AMID}.ckpt", weights_only=True))
    said = [r.getMessage() for r in caplog.records if "put together in memory" in r.getMessage()]
    assert len(said) == (who is not None) and all(re.search(str(who), text) for text in said)
    assert read[0].get("sum") == read[1].get("sum")
    for key, value in read[1]["state_dict"].items():
        assert torch.equal(read[0]["state_dict"][key], value), key


class Changing(zoo.Stack):
    """Changes what would be lost."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["blocks.0.0.weight"].mul_(2)


def test_what_changes_a_checkpoint_in_place(tmp_path: Path) -> None:
    """Would change the model itself in plain training."""
    with pytest.raises(RuntimeError, match=r"mul_ would change .*blocks\.0.*a new one in its place"):
        fit(Case(Changing), hydra(device_memory="80KiB"), into=tmp_path)


def test_no_room_to_put_it_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before training, with who wants it so."""
    monkeypatch.setattr(saving, "available_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"a hook on the state dict of blocks\.2 \(Sequential\).* 1 kB of memory"):
        fit(Case(WithHook), hydra(device_memory="80KiB"), into=tmp_path)
    fit(Case(WithHook), hydra(device_memory="80KiB"), max_epochs=1)  # nothing is to be saved


class Scored(zoo.Stack):
    """Is validated; its score goes up and down."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.loss(*batch))


def test_every_way_to_save(tmp_path: Path) -> None:
    """Top k, weights only, links to the last one, by hand amid training and after it; and every way to load."""

    def run(strategy: Any, folder: Path) -> tuple[Trainer, Scored]:
        callbacks = [
            ModelCheckpoint(folder, "best-{step}", "score", save_top_k=2, every_n_train_steps=2, save_last="link"),
            ModelCheckpoint(folder, "weights-{step}", every_n_train_steps=3, save_weights_only=True, save_top_k=1),
        ]
        seed_everything(3, verbose=False)
        model = Scored(lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
        arguments = {**QUIET, "enable_checkpointing": True, "max_epochs": 2, "val_check_interval": 2}
        trainer = Trainer(**arguments, callbacks=callbacks, strategy=strategy)
        trainer.fit(model, Loader(zoo.batches(BATCHES)), Loader(zoo.batches(2)))
        trainer.save_checkpoint(folder / "afterwards.ckpt")
        return trainer, model

    trainer, model = run(hydra(device_memory="120KiB"), tmp_path / "ours")
    run("auto", tmp_path / "plain")
    names = [sorted(p.name for p in (tmp_path / folder).iterdir()) for folder in ("ours", "plain")]
    assert names[0] == names[1] and len(names[0]) == 5
    for name in names[0]:
        mine, other = (torch.load(tmp_path / f / name, weights_only=True) for f in ("ours", "plain"))
        assert mine.keys() - {KEY} == other.keys()
        for key, value in other["state_dict"].items():
            assert torch.equal(mine["state_dict"][key], value)
    [weights] = [name for name in names[0] if name.startswith("weights")]
    fresh = Scored()
    scores = [
        trainer.validate(fresh, Loader(zoo.batches(2)), ckpt_path=tmp_path / "ours" / name, verbose=False)
        for name in (weights, "last.ckpt")
    ]
    assert scores[0] != scores[1]
    for name in names[0]:
        loaded = Scored.load_from_checkpoint(tmp_path / "ours" / name, map_location="cpu")
        assert loaded.state_dict().keys() == model.state_dict().keys()


def test_what_cannot_be_gone_on_from(tmp_path: Path) -> None:
    """A damaged file, another model's, an optimizer of other settings: said before anything is trained."""
    adam = Case(stack(torch.optim.AdamW, lr=0.01))
    fit(adam, "auto", into=tmp_path, max_epochs=1)
    file = tmp_path / f"step={AMID}.ckpt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "damaged.ckpt").write_bytes(content)
    (tmp_path / "short.ckpt").write_bytes(content[:-300])
    torch.save({"state_dict": {}}, tmp_path / "weights.ckpt")
    torch.save({**torch.load(file, weights_only=True), "state_dict": {"a": torch.ones(1)}}, tmp_path / "other.ckpt")
    more = Case(stack(torch.optim.AdamW, lr=0.01, amsgrad=True), "150KiB")
    fit(more, "auto", into=tmp_path / "more", max_epochs=1)
    for name, error, match in (
        ("damaged.ckpt", CheckpointError, "damaged.ckpt cannot be read: it is damaged"),
        ("short.ckpt", CheckpointError, "it is cut off"),
        ("weights.ckpt", CheckpointError, "no checkpoint of Lightning's"),
        ("other.ckpt", RuntimeError, "Missing key"),
        (f"more/step={AMID}.ckpt", ValueError, "keeps 'max_exp_avg_sq' for each parameter"),
    ):
        with pytest.raises(error, match=match):
            fit(adam, hydra(device_memory="120KiB"), from_=str(tmp_path / name))


def test_parts_of_a_model(tmp_path: Path) -> None:
    """``strict_loading = False`` loads what is there."""

    class Some(zoo.Stack):
        strict_loading = False

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {k: v for k, v in super().state_dict(*args, **kwargs).items() if "blocks.1" not in k}

    case = Case(Some, "80KiB")
    whole = fit(case, "auto", into=tmp_path / "plain")
    runs = [
        fit(case, s, from_=str(tmp_path / "plain" / f"step={AMID}.ckpt"))
        for s in ("auto", hydra(device_memory="80KiB"))
    ]
    assert_same(runs[1], runs[0])
    assert runs[0].losses != whole.losses[AMID:]  # a block began anew


class Found(zoo.Stack):
    """Has a learning rate that is looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def test_the_learning_rate_finder(tmp_path: Path) -> None:
    """Trains, and takes it back, in the middle of a fit: weights and states in the store are those of before."""
    runs = []
    for strategy in ("auto", hydra(device_memory="120KiB", disk=tmp_path / "disk", host_memory="4KiB")):
        finder = LearningRateFinder(num_training_steps=16, min_lr=1e-4, early_stop_threshold=None)
        runs.append(fit(Case(Found), strategy, extra=[finder], default_root_dir=tmp_path))
    assert runs[0].trainer.lightning_module.lr == runs[1].trainer.lightning_module.lr != 0.01
    assert_same(runs[1], runs[0])
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]
