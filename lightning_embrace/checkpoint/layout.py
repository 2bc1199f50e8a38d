"""The layout of a sharded checkpoint: which part of Lightning's dictionary is stored where.

| what | where |
|---|---|
| ``state_dict`` | stored as ``model`` |
| optimizer states with tensors | stored as ``optimizer_0``, ``optimizer_1`` …, under the parameters' names |
| other state dicts with sharded tables (averages) | stored under their name; if they lie deeper, in ``embrace_inner`` |
| everything else, as rank 0 has it | ``meta.pt`` |

It is FSDPStrategy's, which Lightning's ``consolidate_checkpoint`` reads. ModelParallelStrategy calls the first
``state_dict``, which that does not find; we read either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_embrace.checkpoint.optimizer_names import numbered_state

#: where the weights are stored: FSDPStrategy's name and ModelParallelStrategy's
MODELS = ("model", "state_dict")
#: state dicts with sharded tables that lie somewhere inside the checkpoint; nested dictionaries
INNER = "embrace_inner"
#: what a user's hook has put under a name that has a meaning here
USERS = "embrace_users"
_OPTIMIZER = re.compile(r"optimizer_(\d+)")


class Parts(NamedTuple):
    """A checkpoint in two.

    Attributes:
        stored: Goes through torch.distributed.checkpoint.
        meta: The rest.
    """

    stored: dict[str, Any]
    meta: dict[str, Any]


def split(checkpoint: Mapping[str, Any]) -> Parts:
    """Divides a checkpoint of Lightning's.

    Args:
        checkpoint: With DTensors for shards, and optimizer states that have names.

    Raises:
        ValueError: A shard lies where it cannot be stored.
    """
    meta = dict(checkpoint)
    stored: dict[str, Any] = {MODELS[0]: dict(meta.pop("state_dict"))}
    users = {key: meta.pop(key) for key in list(meta) if key in MODELS or is_optimizers(key)}
    if users:
        meta[USERS] = users
    for number, state in enumerate(meta.pop("optimizer_states", [])):
        # an optimizer without states would lose even its empty `state`: only values are stored
        part = stored if any(isinstance(v, Tensor) for v in _leaves(state)) else meta
        part[f"optimizer_{number}"] = state
    for key in [k for k, v in meta.items() if _has_shards(v)]:
        kept, taken = _taken(meta.pop(key), f"[{key!r}]")
        if kept is None:
            stored[key] = taken
        else:
            meta[key] = kept
            stored.setdefault(INNER, {})[key] = taken
    return Parts(stored, meta)


def own_part(stored: Any, rank: int) -> Any:
    """What one rank writes of it: rank 0 its shards and whatever is not sharded, the others their shards."""
    if rank == 0:
        return stored
    if isinstance(stored, Mapping):
        return {key: part for key, value in stored.items() if (part := own_part(value, rank)) is not None}
    return stored if isinstance(stored, DTensor) and stored.to_local().numel() > 0 else None


def joined(stored: dict[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint of Lightning's that both parts make. Also of a file in which Lightning has put them together."""
    checkpoint = {**meta, **stored}
    users = checkpoint.pop(USERS, {})
    if "state_dict" not in checkpoint and MODELS[0] in checkpoint:
        checkpoint["state_dict"] = checkpoint.pop(MODELS[0])
    if "optimizer_states" not in checkpoint:
        numbers = sorted(int(match[1]) for key in checkpoint if (match := _OPTIMIZER.fullmatch(key)))
        if numbers:
            checkpoint["optimizer_states"] = [checkpoint.pop(f"optimizer_{n}") for n in numbers]
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [numbered_state(s) for s in checkpoint["optimizer_states"]]
    if INNER in checkpoint:
        _put_back(checkpoint, checkpoint.pop(INNER))
    checkpoint.update(users)
    return checkpoint


def is_optimizers(key: object) -> bool:
    """Whether an optimizer's state is stored under this key."""
    return isinstance(key, str) and _OPTIMIZER.fullmatch(key) is not None


def _taken(value: Any, where: str) -> tuple[Any, dict[str, Any]]:
    """A value without the state dicts in it that have shards, None if it is one; and these, at their places."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(
            f"checkpoint{where} holds a sharded table outside of a state dict (a dictionary with names for keys), and"
            " with state_dict_type='sharded' only these are written by all ranks. Keep it in a state dict, or take its"
            " `full_tensor()` on every rank."
        )
    if any(isinstance(v, DTensor) for v in value.values()):
        return None, dict(value)
    kept, taken = {}, {}
    for key, inner in value.items():
        if _has_shards(inner):
            rest, taken[key] = _taken(inner, f"{where}[{key!r}]")
            if rest is not None:
                kept[key] = rest
        else:
            kept[key] = inner
    return kept, taken


def _put_back(checkpoint: dict[str, Any], inner: Mapping[str, Any]) -> None:
    for key, value in inner.items():
        if isinstance(checkpoint.get(key), dict) and isinstance(value, Mapping):
            _put_back(checkpoint[key], value)
        else:
            checkpoint[key] = value


def _has_shards(value: Any) -> bool:
    return any(isinstance(leaf, DTensor) for leaf in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value
