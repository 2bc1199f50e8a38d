"""Whether a checkpoint is that of a model: asked before anything is loaded, as torch finds it out while it loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

#: by name, the shape of a tensor; None for what is not a tensor
Shapes = Mapping[str, tuple[int, ...] | None]


def shapes_of(state_dict: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """What is compared; of a sharded table, the shape of the whole."""
    return {key: _shape(value) for key, value in state_dict.items()}


def misfits(model: nn.Module, saved: Shapes, strict: bool) -> list[str]:
    """What torch would complain of, worded as torch words it. Modules that load in a way of their own are left out.

    Args:
        model: The model; of its tables this rank may have some columns.
        saved: What is to be loaded.
        strict: As in ``load_state_dict``.

    Returns:
        One text for each complaint.
    """
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return []
    ways = tuple(f"{name}." if name else "" for name, module in model.named_modules() if _has_its_own_way(module))
    wanted = shapes_of(model.state_dict())
    return list(_complaints(_without(wanted, ways), _without(saved, ways), strict))


def check_fits(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Refuses the state dict of another model before anything is loaded.

    Raises:
        RuntimeError: It is that of another one.
    """
    complaints = misfits(model, shapes_of(state_dict), strict)
    if complaints:
        lines = "\n\t".join(complaints)
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{lines}\nNothing has been loaded."
        )


def _complaints(wanted: Shapes, saved: Shapes, strict: bool) -> Iterator[str]:
    # files of old releases do not have the counters of batch norms
    missing = [key for key in wanted if key not in saved and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in saved if key not in wanted]
    if strict and unexpected:
        yield f"Unexpected key(s) in state_dict: {_quoted(unexpected)}. "
    if strict and missing:
        yield f"Missing key(s) in state_dict: {_quoted(missing)}. "
    for key, here in wanted.items():
        there = saved.get(key)
        # one number may have been saved as a vector of one
        if here is not None and there is not None and here != there and (here, there) != ((), (1,)):
            yield (
                f"size mismatch for {key}: copying a param with shape {there} from checkpoint, the shape in current"
                f" model is {here}."
            )


def _without(shapes: Shapes, prefixes: tuple[str, ...]) -> Shapes:
    return {key: shape for key, shape in shapes.items() if not key.startswith(prefixes)} if prefixes else shapes


def _has_its_own_way(module: nn.Module) -> bool:
    """What it saves or loads may be something else than its parameters and buffers."""
    methods = (type(module).state_dict, type(module)._save_to_state_dict, type(module)._load_from_state_dict)
    lazy = any(is_lazy(t) for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
    return (
        lazy
        or any(not method.__module__.startswith(("torch.nn.", "lightning_embrace.")) for method in methods)
        or bool(module._state_dict_hooks or module._load_state_dict_pre_hooks)
    )


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) and not is_lazy(value) else None


def _quoted(keys: list[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)
