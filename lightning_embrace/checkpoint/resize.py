"""Vocabularies that have grown: more rows for a table, in a model or in a checkpoint with its optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_embrace.tables.column_tensor import ColumnTensor
from lightning_embrace.tables.modules import handle_of

#: fills new rows [new, D] in place
Init = Callable[[Tensor], object]
#: where checkpoints keep weights: Lightning's own, and the current ones beside averages
_STATE_DICTS = ("state_dict", "current_model_state")


def resize_embedding(
    target: nn.Module | dict[str, Any],
    name: str,
    num_embeddings: int,
    init: Init = nn.init.normal_,
    *,
    parameters: Sequence[Sequence[str]] | None = None,
) -> None:
    """Adds rows to an embedding table; the old ones stay what they are.

    In a model, before ``fit``: the Parameter keeps its identity, and layers that are tied to it grow with it. In a
    checkpoint of Lightning's, as ``torch.load`` returns it: the table, what is tied to it, and their optimizer states,
    so that ``fit(ckpt_path=...)`` goes on with the grown model. New rows have the state of rows that no step has moved:
    zero, or Adagrad's ``initial_accumulator_value``. ``padding_idx`` stays. Hyperparameters in a checkpoint are left
    alone: give the new number to ``load_from_checkpoint``.

    Args:
        target: A model with whole tables, or a checkpoint (a dictionary, changed in place), or a state dict.
        name: The module: ``"encoder.words"``.
        num_embeddings: How many rows the table shall have.
        init: Fills the new rows [new, D] in place, by default as ``nn.Embedding`` does.
        parameters: For checkpoints with several parameters of the table's shape, whose states have numbers and no
            names: for each optimizer the names of its parameters, in its order. Default: the order of the state dict.

    Raises:
        ValueError: There is no such table, it would shrink, this process has only some of its columns, something else
            uses the weight, or it is not clear which optimizer state is the table's.
    """
    if isinstance(target, nn.Module):
        _resize_in_model(target, name, num_embeddings, init)
    else:
        _resize_in_checkpoint(target, name, num_embeddings, init, parameters)


# ---- in a model ------------------------------------------------------------------------------------------------------


def _resize_in_model(model: nn.Module, name: str, rows: int, init: Init) -> None:
    tables = {n: m for n, m in model.named_modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    if name not in tables:
        raise ValueError(f"The model has no nn.Embedding or nn.EmbeddingBag {name!r}; it has {_listed(tables)}.")
    table = tables[name]
    if handle_of(table) is not None or isinstance(table._parameters.get("weight"), ColumnTensor):
        raise ValueError(
            f"Of table {name!r} this process has only some columns. Resize it before `fit`, or a checkpoint:"
            " resize_embedding(torch.load(path), ...); in `configure_model` make it with the number that it shall have."
        )
    weight = table.weight
    grown = _grown(name, weight.detach(), rows, init)
    users = [(n, key, m) for n, m in model.named_modules() for key, p in m._parameters.items() if p is weight]
    for user_name, key, user in users:
        if key != "weight" or not isinstance(user, (nn.Embedding, nn.EmbeddingBag, nn.Linear)):
            raise ValueError(
                f"The weight of {name!r} is `{user_name}.{key}` too, and what else of a {type(user).__name__} would"
                " have to grow is not known. Resize it before you tie it."
            )
    old = weight.shape[0]
    weight.data = grown
    weight.grad = None
    for _, _, user in users:
        if isinstance(user, nn.Linear):
            user.out_features = rows
            if user.bias is not None and user.bias.shape[0] == old:
                user.bias.data = _grown(name, user.bias.detach(), rows, torch.Tensor.zero_)
        else:
            user.num_embeddings = rows


# ---- in a checkpoint -------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """A parameter's state in an optimizer's state dict."""

    state: dict[str, Any]
    group: dict[str, Any]


def _resize_in_checkpoint(
    checkpoint: dict[str, Any], name: str, rows: int, init: Init, parameters: Sequence[Sequence[str]] | None
) -> None:
    kept = checkpoint.get("state_dict", checkpoint)
    key = f"{name}.weight"
    weight = kept.get(key)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        matrices = [k.removesuffix(".weight") for k, v in kept.items() if k.endswith(".weight") and _is_matrix(v)]
        raise ValueError(f"The checkpoint has no table {name!r}; it has {_listed(matrices)}.")
    tied = [k for k, v in kept.items() if _same_storage(v, weight)]
    # a tied output layer has a bias with an entry for each word
    biases = [b for k in tied if (b := k.removesuffix("weight") + "bias") in kept and kept[b].shape == weight.shape[:1]]
    optimizers = checkpoint.get("optimizer_states", []) if kept is not checkpoint else []
    places = {k: _places(kept, optimizers, k, parameters) for k in [key, *biases]}
    _grow(checkpoint, kept, tied, places[key], name, rows, init)
    for bias in biases:
        _grow(checkpoint, kept, [bias], places[bias], name, rows, torch.Tensor.zero_)


def _grow(
    checkpoint: dict[str, Any],
    kept: dict[str, Any],
    keys: list[str],
    places: list[_Place],
    name: str,
    rows: int,
    init: Init,
) -> None:
    """One parameter, under all of its names, and its states."""
    old = kept[keys[0]]
    grown = _grown(name, old, rows, init)
    new_rows = grown[old.shape[0] :]
    for part in (kept, *(checkpoint.get(k) for k in _STATE_DICTS)):
        if part is not None and keys[0] in part:
            whole = grown if part is kept else _grown(name, part[keys[0]], rows, lambda new: new.copy_(new_rows))
            part.update({k: whole for k in keys if k in part})
    for place in places:
        for state_name, value in place.state.items():
            if isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) in _shapes_of_state(old):
                place.state[state_name] = _grown_state(state_name, value, place.group, new_rows, rows)


def _shapes_of_state(weight: Tensor) -> set[tuple[int, ...]]:
    """A state has an entry for every number of the weight, or one for every row."""
    return {tuple(weight.shape), (weight.shape[0],), (weight.shape[0], 1)}


def _grown_state(name: str, value: Tensor, group: dict[str, Any], new_rows: Tensor, rows: int) -> Tensor:
    """A state with rows as they are before any step: torch's optimizers begin with zero but for these."""
    if value.is_sparse:
        shape = (rows, *value.shape[1:])
        value = value.coalesce()
        return torch.sparse_coo_tensor(
            value.indices(), value.values(), shape, is_coalesced=True, check_invariants=False
        )
    fills: dict[str, Init] = {
        "sum": lambda new: new.fill_(group.get("initial_accumulator_value", 0.0)),  # Adagrad
        "step_size": lambda new: new.fill_(float(group["lr"])),  # Rprop
        "ax": lambda new: new.copy_(new_rows),  # ASGD's average of the weights
    }
    return _grown(name, value, rows, fills.get(name, torch.Tensor.zero_))


def _places(
    kept: dict[str, Any], optimizers: list[dict[str, Any]], key: str, parameters: Sequence[Sequence[str]] | None
) -> list[_Place]:
    """Where the optimizers keep a parameter's state; empty: none trains it, or it has made no state."""
    if parameters is not None and len(parameters) != len(optimizers):
        raise ValueError(
            f"`parameters` has names for {len(parameters)} optimizers, and the checkpoint has {len(optimizers)}."
        )
    told = parameters if parameters is not None else [None] * len(optimizers)
    known = [_state_keys(optimizer, names) for optimizer, names in zip(optimizers, told)]
    if any(keys is None for keys in known):
        found = _by_shape(kept, optimizers, key)
    else:
        found = [(o, keys[key]) for o, keys in zip(optimizers, known) if keys is not None and key in keys]
    return [
        _Place(o["state"][n], next(g for g in o["param_groups"] if n in g["params"]))
        for o, n in found
        if n in o["state"]
    ]


def _state_keys(optimizer: dict[str, Any], told: Sequence[str] | None) -> dict[str, Any] | None:
    """By name of a parameter, what its state is kept under; None where nobody knows names.

    An optimizer that was given `named_parameters()` keeps them (torch 2.6 and later), and states that come from sharded
    checkpoints are under names.
    """
    groups = optimizer["param_groups"]
    numbers = [n for group in groups for n in group["params"]]
    if told is not None:
        return dict(zip(told, numbers))
    if all(isinstance(n, str) for n in numbers):
        return {n: n for n in numbers}
    if all("param_names" in group for group in groups):
        return dict(zip([name for group in groups for name in group["param_names"]], numbers))
    return None


def _by_shape(kept: dict[str, Any], optimizers: list[dict[str, Any]], key: str) -> list[tuple[dict[str, Any], Any]]:
    """Finds a state by the shape of its parameter; among several of one shape, by their order."""
    shape = kept[key].shape
    candidates = [
        (optimizer, number)
        for optimizer in optimizers
        for number, state in sorted(optimizer["state"].items())
        if any(isinstance(v, Tensor) and v.shape == shape for v in state.values())
    ]
    peers: list[str] = []
    for k, value in kept.items():
        alike = isinstance(value, Tensor) and value.shape == shape
        if alike and not any(_same_storage(value, kept[peer]) for peer in peers):
            peers.append(k)
    if not candidates:
        return []
    if len(candidates) != len(peers):
        raise ValueError(
            f"{len(peers)} parameters have the shape {tuple(shape)} of `{key}`, and {len(candidates)} optimizer states"
            " do: which is the table's is not clear. Give resize_embedding(..., parameters=[names]) the names of each"
            " optimizer's parameters in its order: [name for name, _ in model.named_parameters()] where it was given"
            " `model.parameters()`."
        )
    position = next(i for i, peer in enumerate(peers) if _same_storage(kept[peer], kept[key]))
    return [candidates[position]]


# ---- rows ------------------------------------------------------------------------------------------------------------


def _grown(name: str, old: Tensor, rows: int, init: Init) -> Tensor:
    """The old rows and, behind them, new ones."""
    if rows < old.shape[0]:
        raise ValueError(
            f"Table {name!r} has {old.shape[0]} rows, and {rows} were asked for: a table does not shrink, as nobody"
            " would know which rows to drop. Build a new one and copy the rows that you want to keep."
        )
    grown = old.new_empty(rows, *old.shape[1:])
    grown[: old.shape[0]] = old
    if rows > old.shape[0]:
        init(grown[old.shape[0] :])
    return grown


def _same_storage(value: Any, weight: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == weight.layout == torch.strided
        and value.shape == weight.shape
        and value.data_ptr() == weight.data_ptr()
    )


def _is_matrix(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2


def _listed(names: Any) -> str:
    shown = [repr(n) for n in names]
    return f"{', '.join(shown[:10])}{', …' * (len(shown) > 10)}" if shown else "none"
