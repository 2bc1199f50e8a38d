"""Who reads the values of a checkpoint before it is written: then whole tables must be there by then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from lightning_embrace.checkpoint.archive import can_leave_room
from lightning_embrace.checkpoint.atomic import local_path
from lightning_embrace.namespaces import Namespace
from lightning_embrace.tables.modules import SAVES_SHARDS, is_sharded

#: of Lightning's callbacks that take averages, the hook that hands them out: it passes tensors on, and reads none
_PASSING_ON = {"WeightAveraging": "on_save_checkpoint", "StochasticWeightAveraging": "state_dict"}


def reader_of_state(model: nn.Module) -> str | None:
    """Looks for what changes a state dict as it is made.

    Args:
        model: The model.

    Returns:
        None where tables are only passed on, else who gets to see them.
    """
    return next(_in_state(model), None)


def reader_of_checkpoint(trainer: Any, precision: Any, namespace: Namespace, weights_only: bool) -> str | None:
    """Looks for hooks that are given a checkpoint of the Trainer's before it is written.

    Args:
        trainer: The Trainer.
        precision: The precision plugin.
        namespace: Of Lightning.
        weights_only: Callbacks are not asked.

    Returns:
        None where there are none, else which.
    """
    return next(_in_hooks(trainer, precision, namespace, weights_only), None)


def reader_at(checkpoint_io: Any, path: Any, plain: tuple[type, ...]) -> str | None:
    """Looks at where the file goes.

    Args:
        checkpoint_io: The CheckpointIO.
        path: The path.
        plain: Those that save with torch, as they are.

    Returns:
        None where it is written piece by piece, else what is given the whole.
    """
    if type(checkpoint_io) not in plain:
        return type(checkpoint_io).__name__
    if local_path(path) is None:
        return f"the file system of {path}"
    if not can_leave_room():
        return "torch.save before torch 2.6"
    return None


def _in_state(model: nn.Module) -> Iterator[str]:
    tables = [(name, module) for name, module in model.named_modules() if is_sharded(module)]
    for name, module in tables:
        if type(module)._save_to_state_dict is not SAVES_SHARDS:
            yield f"`_save_to_state_dict` of {_named(module, name)}"
    yield from readers_above(model, [name for name, _ in tables])


def readers_above(
    model: nn.Module, names: Collection[str], ours: Callable[[Any], bool] = lambda hook: False
) -> Iterator[str]:
    """Looks for what is given the state dict of some modules as it is made: others are not.

    Args:
        model: The model.
        names: Of the modules.
        ours: Whether a hook reads nothing.

    Returns:
        Who, in a few words.
    """
    above = {name[:end] for name in names for end in (0, *_ends(name), len(name))}
    for name in sorted(above):
        module = model.get_submodule(name)
        if not _is(module, "state_dict", nn.Module):
            yield f"`state_dict` of {_named(module, name)}"
        if not all(ours(hook) for hook in module._state_dict_hooks.values()):
            yield f"a hook on the state dict of {_named(module, name)}"


def _in_hooks(trainer: Any, precision: Any, namespace: Namespace, weights_only: bool) -> Iterator[str]:
    module = trainer.lightning_module
    if not _is(module, "on_save_checkpoint", namespace.get("LightningModule")):
        yield f"`on_save_checkpoint` of {_named(module)}"
    if weights_only:
        return
    if not _is(precision, "on_save_checkpoint", namespace.get("plugins.Precision")):
        yield f"`on_save_checkpoint` of {_named(precision)}"
    base = namespace.get("Callback")
    for callback in trainer.callbacks:
        averaging = [n for n in _PASSING_ON if isinstance(callback, getattr(namespace.get("callbacks"), n, ()))]
        for name in averaging:
            # while tables are sharded, the strategy lies over the hook of this one object
            hook = _PASSING_ON[name]
            if getattr(type(callback), hook) is not getattr(namespace.get(f"callbacks.{name}"), hook):
                yield f"`{hook}` of {_named(callback)}"
        passing_on = {_PASSING_ON[name] for name in averaging}
        if "on_save_checkpoint" not in passing_on and not _is(callback, "on_save_checkpoint", base):
            yield f"`on_save_checkpoint` of {_named(callback)}"


def _is(owner: Any, name: str, base: Any) -> bool:
    """Whether an object's method is that of a base class."""
    return getattr(getattr(owner, name), "__func__", None) is getattr(base, name)


def _ends(name: str) -> Iterator[int]:
    return (end for end, character in enumerate(name) if character == ".")


def _named(owner: Any, name: str = "") -> str:
    return f"{name} ({type(owner).__name__})" if name else type(owner).__name__
