"""``state_dict_type="sharded"``: folders that go on as files do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_embrace import CheckpointError, HydraStrategy, last_whole_checkpoint
from lightning_embrace.checkpoint import stored
from lightning_embrace.checkpoint.consolidate import consolidate
from lightning_embrace.checkpoint.ranks import KEY
from tests.hydra import zoo
from tests.hydra.runs import QUIET, assert_same, hydra
from tests.hydra.test_saving import AMID, BATCHES, CASES, Case, Hooked, fit, rest_of


def check(name: str, folder: Path, tier: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders go on under ``sharded`` and ``full``; made files, they are plain training's."""
    monkeypatch.setattr(stored, "BLOCK_BYTES", 1 << 12)  # several blocks of one tensor, and files
    case = CASES[name]
    sharded = partial(hydra, device_memory=case.device, state_dict_type="sharded", **tier)
    whole = fit(case, "auto", into=folder / "plain")
    assert_same(fit(case, sharded(), into=folder / "ours"), whole)
    for steps, at in ((AMID, f"step={AMID}.ckpt"), (BATCHES, "end-epoch=0.ckpt")):
        ours = folder / "ours" / at
        assert ours.is_dir() and len(list(ours.glob("*.distcp"))) > 3
        consolidate(ours, folder / f"{steps}.ckpt")
        made, plain = (torch.load(p, weights_only=True) for p in (folder / f"{steps}.ckpt", folder / "plain" / at))
        assert made.keys() == {*plain, KEY}
        for key, value in plain["state_dict"].items():
            assert torch.equal(made["state_dict"][key], value)
        for strategy, path in (
            (sharded(), ours),
            (hydra(device_memory=case.device), ours),
            (sharded(), folder / "plain" / at),
            ("auto", folder / f"{steps}.ckpt"),
        ):
            assert_same(fit(case, strategy, from_=str(path)), rest_of(whole, steps))


def test_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample."""
    check("groups and scheduler", tmp_path, {"disk": tmp_path / "disk", "host_memory": "4KiB"}, monkeypatch)


@pytest.mark.matrix
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("name", CASES)
def test_going_on_everywhere(name: str, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full product."""
    folder = {"disk": tmp_path / "disk", "host_memory": "4KiB"} if tier == "disk" else {}
    check(name, tmp_path, folder, monkeypatch)


def test_lightning_reads_it(tmp_path: Path) -> None:
    """Lightning's own ``consolidate_checkpoint``."""
    fit(CASES["adamw"], hydra(device_memory="120KiB", state_dict_type="sharded"), into=tmp_path, max_epochs=1)
    fit(CASES["adamw"], "auto", into=tmp_path / "plain", max_epochs=1)
    made = _load_distributed_checkpoint(tmp_path / f"step={AMID}.ckpt")
    plain = torch.load(tmp_path / "plain" / f"step={AMID}.ckpt", weights_only=True)
    for key, value in plain["state_dict"].items():
        assert torch.equal(made["model"][key], value)
    first = made["optimizer_0"]["state"]["first.weight"]
    assert torch.equal(first["exp_avg"], plain["optimizer_states"][0]["state"][0]["exp_avg"])


def test_weights_are_read_in_place(tmp_path: Path) -> None:
    """No second copy of a weight is made; a hook that is given a checkpoint is given one of its own."""
    sharded = partial(hydra, device_memory="120KiB", state_dict_type="sharded")
    fit(CASES["adamw"], sharded(), into=tmp_path, max_epochs=1)
    seen: dict[str, bool] = {}

    class Looking(zoo.Stack):
        def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
            seen["own"] = state["blocks.0.0.weight"].data_ptr() != self.blocks[0][0].weight.data_ptr()
            return super().load_state_dict(state, *args, **kwargs)

    class Plain(zoo.Stack):
        def setup(self, stage: str) -> None:
            self.strategy = self.trainer.strategy
            read = self.strategy.load_model_state_dict

            def load(checkpoint: Any, strict: bool) -> None:
                weight = checkpoint["state_dict"]["blocks.0.0.weight"]
                seen["in place"] = weight.data_ptr() == self.blocks[0][0].weight.data_ptr()
                read(checkpoint, strict)

            self.strategy.load_model_state_dict = load

    adamw = [partial(kind, lambda p: torch.optim.AdamW(p, lr=0.01)) for kind in (Looking, Plain)]
    for make in adamw:
        fit(Case(make), sharded(), from_=str(tmp_path / f"step={AMID}.ckpt"))
    assert seen == {"own": True, "in place": True}


def test_hooks_are_given_values(tmp_path: Path) -> None:
    """True ones, in memory."""
    for folder, settings in (("ours", {"state_dict_type": "sharded"}), ("plain", {})):
        fit(Case(Hooked), hydra(device_memory="80KiB", **settings), into=tmp_path / folder, max_epochs=1)
    meta = torch.load(tmp_path / "ours" / f"step={AMID}.ckpt" / "meta.pt", weights_only=True)
    assert meta["sum"] == torch.load(tmp_path / "plain" / f"step={AMID}.ckpt", weights_only=True)["sum"]


def test_damage_and_removal(tmp_path: Path) -> None:
    """What was changed or is missing is named, with the last whole one; folders are removed as files are."""
    sharded = partial(hydra, device_memory="120KiB", state_dict_type="sharded")
    fit(CASES["adamw"], sharded(), into=tmp_path, max_epochs=1)
    broken = tmp_path / "end-epoch=0.ckpt"
    (broken / "meta.pt").unlink()
    with pytest.raises(CheckpointError, match=r"meta\.pt is missing.*step=5\.ckpt"):
        fit(CASES["adamw"], sharded(), from_=str(broken))
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / f"step={AMID}.ckpt")
    strategy = sharded()
    Trainer(**QUIET, strategy=strategy)
    strategy.remove_checkpoint(broken)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step={AMID}.ckpt"]


def test_refused(tmp_path: Path) -> None:
    """Before training: what would write files, and unknown values."""
    with pytest.raises(
        MisconfigurationException, match=r"HydraStrategy\(state_dict_type='sharded'\) and the plugin Async"
    ):
        fit(Case(zoo.Stack, arguments=lambda: {"plugins": [AsyncCheckpointIO()]}), sharded_strategy(), into=tmp_path)
    with pytest.raises(ValueError, match=r"state_dict_type='some'.*'full', 'sharded'"):
        HydraStrategy(state_dict_type="some")  # type: ignore[arg-type]


def sharded_strategy() -> HydraStrategy:
    return hydra(device_memory="80KiB", state_dict_type="sharded")
