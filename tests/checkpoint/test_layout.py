"""Which part of a checkpoint is stored where, and how the parts come together again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_embrace.checkpoint.layout import joined, own_part, split
from tests.support.ranks import free_port


@pytest.fixture(scope="module")
def shard() -> Iterator[Tensor]:
    """A DTensor, of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"tcp://127.0.0.1:{free_port()}")
    yield DTensor.from_local(torch.ones(3, 2), DeviceMesh.from_group(dist.group.WORLD, "cpu"), [Shard(1)])
    dist.destroy_process_group()


def optimizer(state: Any) -> dict[str, Any]:
    return {"state": state, "param_groups": [{"params": ["w", "b"], "lr": 0.1}]}


def test_split_and_joined(shard: Tensor) -> None:
    """Everything is found again at its place, whoever has put it there, and optimizers have numbers again."""
    bias = torch.zeros(2)
    checkpoint = {
        "epoch": 3,
        "state_dict": {"w": shard, "b": bias},
        "optimizer_states": [optimizer({"w": {"m": shard}, "b": {"m": bias, "step": 1}}), optimizer({})],
        "current_model_state": {"w": shard, "b": bias},
        "callbacks": {"swa": {"average": {"w": shard}, "count": 2}, "other": {"best": torch.ones(1)}},
        "model": "the user's",
        "optimizer_7": "the user's too",
    }
    kept = dict(checkpoint)
    stored, meta = split(checkpoint)
    assert checkpoint == kept, "what was given has changed"
    assert set(stored) == {"model", "optimizer_0", "current_model_state", "embrace_inner"}
    assert meta["callbacks"] == {"swa": {"count": 2}, "other": {"best": torch.ones(1)}}
    assert meta["optimizer_1"] == optimizer({}), "an empty state is not stored by torch.distributed.checkpoint"
    assert "model" not in meta and "optimizer_0" not in meta
    again = joined(stored, meta)
    assert set(again) == set(checkpoint)
    for key in ("epoch", "state_dict", "current_model_state", "callbacks", "model", "optimizer_7"):
        assert again[key] == checkpoint[key], key
    first, second = again["optimizer_states"]
    assert first["state"] == {0: {"m": shard}, 1: {"m": bias, "step": 1}}
    assert first["param_groups"] == second["param_groups"] == [{"params": [0, 1], "lr": 0.1}]
    assert second["state"] == {}


def test_joined_leaves_ddps_files_alone() -> None:
    """A file that has DDP's layout is what it was, whatever a user has put into it."""
    checkpoint = {
        "state_dict": {"w": torch.ones(1)},
        "optimizer_states": [{"state": {1: {"m": 2}}, "param_groups": [{"params": [0, 1]}]}, {"no torch": "optimizer"}],
        "model": 1,
        "optimizer_0": 2,
    }
    assert joined({}, checkpoint) == checkpoint


def test_own_part(shard: Tensor) -> None:
    """Rank 0 has everything, the others their shards; a rank without columns has none."""
    empty = DTensor.from_local(
        torch.ones(3, 0), shard.device_mesh, [Shard(1)], run_check=False, shape=torch.Size((3, 2)), stride=(2, 1)
    )
    stored = {
        "model": {"w": shard, "e": empty, "b": torch.ones(1)},
        "optimizer_0": {"groups": [{"lr": None}], "x": None},
    }
    assert own_part(stored, 0) is stored
    assert own_part(stored, 1) == {"model": {"w": shard}, "optimizer_0": {}}


@pytest.mark.parametrize(
    ("value", "where"), [([1, 2], r"checkpoint\['mine'\] holds"), ({"a": {3: 4}}, r"checkpoint\['mine'\]\['a'\] holds")]
)
def test_shards_at_other_places(shard: Tensor, value: Any, where: str) -> None:
    """Refused: nobody could say what the whole of it is."""
    if isinstance(value, list):
        value = [*value, shard]
    else:
        value["a"][3] = shard
    with pytest.raises(ValueError, match=where):
        split({"state_dict": {}, "mine": value})
