"""Files of `fabric.save` are written without any rank holding a whole table, and whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from safetensors.torch import load_file

from lightning_embrace.checkpoint.agreement import CheckpointError
from lightning_embrace.checkpoint.atomic import PARTIAL
from tests.checkpoint.test_streaming_distributed import counting
from tests.exactness import story as s
from tests.fabric import loops
from tests.fabric.loops import LOOPS, launched, loader, make, make_strategy
from tests.support.lifecycle import assert_same, plain
from tests.support.ranks import Ranks


class OwnIO(TorchCheckpointIO):
    """Looks at what it writes."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        checkpoint["sum"] = float(checkpoint["model"]["words.weight"].sum())
        super().save_checkpoint(checkpoint, path, storage_options)


def trained(checkpoint_io: Any = None) -> tuple[Any, Any, Any]:
    """Runs in a worker: a module and an optimizer in the middle of a loop."""
    fabric = launched(make_strategy("embrace", checkpoint_io=checkpoint_io), 2)
    model, optimizer = fabric.setup(module := make(), loops.OPTIMIZERS["adam"](module.parameters()))
    LOOPS["plain"](loops.Tools(fabric, model, optimizer, loader(s.drawn(2, 2)), []))
    return fabric, model, optimizer


def save(folder: str) -> Any:
    """Runs in a worker."""
    fabric, model, optimizer = trained()
    state = {"optimizer": optimizer, "model": model, "step": 2}
    with counting() as gathered:
        fabric.save(f"{folder}/first/streamed.ckpt", state)
        fabric.strategy.save_weights(f"{folder}/weights.safetensors")
        assert gathered == []
        fabric.save(f"{folder}/filtered.ckpt", state, filter={"model": lambda name, value: bool((value < 1e9).all())})
        assert gathered != []
    whole = plain(dict(fabric.strategy.full_state_dict()))
    states = optimizer.state_dict()
    # the folder is taken by a file
    with pytest.raises(CheckpointError, match=r"rank 0.*(Not a directory|File exists)"):
        fabric.save(f"{folder}/weights.safetensors/a.ckpt", state)
    fabric.save(f"{folder}/first/streamed.ckpt", {**state, "step": 3})
    fabric.strategy.teardown()
    return whole, plain(states)


def test_no_table_is_gathered(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Whatever comes first in the state; but for a filter, which is given values. A write that fails is one error on
    every rank, after which the next one can be made."""
    [whole, states], _ = ranks(2).run(save, str(tmp_path))
    for name in ("first/streamed.ckpt", "filtered.ckpt"):
        file = torch.load(tmp_path / name, weights_only=True)
        assert_same(dict(file["model"]), whole)
        assert_same(plain(file["optimizer"]), states)
        assert file["step"] == (3 if "streamed" in name else 2)
    weights = load_file(tmp_path / "weights.safetensors")
    assert_same({name: weights[name] for name in whole}, whole)
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(PARTIAL)]


def save_with_own_io(path: str) -> None:
    """Runs in a worker."""
    fabric, model, _ = trained(OwnIO())
    with counting() as gathered:
        fabric.save(path, {"model": model})
    assert gathered != []
    fabric.strategy.teardown()


def test_own_io(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """It is given whole tables."""
    ranks(2).run(save_with_own_io, str(tmp_path / "a.ckpt"))
    file = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert file["sum"] == pytest.approx(float(file["model"]["words.weight"].sum()))
