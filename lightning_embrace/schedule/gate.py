"""Watches every way to a module's parameters, so that a pending update is applied before anybody sees them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_embrace.tables.modules import is_sharded

Reader = Callable[[Tensor], None]
#: torch.compile would take what it saw while tracing for what is always so; such code runs as it is
_never_traced: Callable[[Any], Any] = torch.compiler.disable


class _Gate(dict[str, Any]):
    """A module's ``_parameters``: attribute access, ``parameters()`` and ``state_dict()`` all come by here."""

    def __init__(self, parameters: dict[str, Any], before_read: Reader) -> None:
        super().__init__(parameters)
        self._before_read = before_read

    def _tell(self, parameters: Iterable[Tensor | None]) -> None:
        for parameter in parameters:
            if parameter is not None:
                self._before_read(parameter)

    @_never_traced
    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        self._tell([parameter])
        return parameter

    @_never_traced
    def get(self, name: str, default: Any = None) -> Any:
        parameter = super().get(name, default)
        self._tell([parameter])
        return parameter

    @_never_traced
    def items(self) -> Any:
        self._tell(super().values())
        return super().items()

    @_never_traced
    def values(self) -> Any:
        self._tell(super().values())
        return super().values()

    def __reduce__(self) -> Any:  # copies and pickles of the module are ordinary ones
        return dict, (dict(self.items()),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self.items()), memo)


class ParameterGate:
    """Calls back before a parameter is read through a module of the model, or by one that keeps it elsewhere.

    Not in compiled parts, whose graphs read their parameters unseen, see :func:`is_compiled`; but for sharded tables,
    whose look-ups are no part of a graph.

    Args:
        model: The model.
        parameters: The parameters to watch.
        before_read: Called with the parameter, often: it must be quick where nothing is pending.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[Tensor], before_read: Reader) -> None:
        watched = {id(p) for p in parameters}
        self._modules: list[nn.Module] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        compiled = {id(part) for module in model.modules() if is_compiled(module) for part in module.modules()}
        for module in model.modules():
            if id(module) in compiled and not is_sharded(module):
                continue
            if any(id(p) in watched for p in module._parameters.values() if p is not None):
                self._modules.append(module)
                module.__dict__["_parameters"] = _Gate(module._parameters, before_read)
            kept = [p for parts in kept_elsewhere(module).values() for p in parts if id(p) in watched]
            if kept:
                self._hooks.append(module.register_forward_pre_hook(_Before(kept, before_read)))

    def remove(self) -> None:
        """Leaves the modules as they were found."""
        for module in self._modules:
            gate = module.__dict__["_parameters"]
            module.__dict__["_parameters"] = dict(dict.items(gate))
        for hook in self._hooks:
            hook.remove()
        self._modules, self._hooks = [], []


class _Before:
    """A forward hook for parameters that a module reaches without its ``_parameters``."""

    def __init__(self, parameters: list[Tensor], before_read: Reader) -> None:
        self._parameters, self._before_read = parameters, before_read

    @_never_traced
    def __call__(self, *_: object) -> None:
        for parameter in self._parameters:
            self._before_read(parameter)


def is_compiled(module: nn.Module) -> bool:
    """Whether the module, or a method or function that it keeps, was given to torch.compile or torch.jit."""
    if getattr(module, "_compiled_call_impl", None) is not None or "torch.jit" in type(module).__module__:
        return True
    bases = type(module).__mro__
    own = bases[: bases.index(nn.Module)]
    return any(_is_compiled_function(kept) for owner in (module, *own) for kept in vars(owner).values())


def _is_compiled_function(kept: object) -> bool:
    if isinstance(kept, (nn.Module, Tensor, type)):  # an OptimizedModule keeps its compiled `forward`
        return False
    attributes = getattr(kept, "__dict__", {})
    return "_torchdynamo_orig_callable" in attributes and "_torchdynamo_disable" not in attributes


def kept_elsewhere(owner: object, depth: int = 3) -> dict[str, list[Tensor]]:
    """Parameters that a module, or any other object, reaches past the modules they belong to.

    Args:
        owner: The object.
        depth: How many containers and objects to look into, one inside the other.

    Returns:
        The parameters by attribute: those in plain lists, tuples, sets and dictionaries, behind weak references, and in
        objects that are neither modules nor torch's or Lightning's own.
    """
    found: dict[str, list[Tensor]] = {}
    for name, value in vars(owner).items():
        if name not in ("_parameters", "_modules", "_buffers"):
            parameters = list(_search(value, depth))
            if parameters:
                found[name] = parameters
    return found


def _search(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, weakref.ref):
        value = value()
    if isinstance(value, nn.Parameter):
        yield value
    elif depth > 0 and isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _search(item, depth - 1)
    elif depth > 0 and isinstance(value, dict):
        for item in value.values():
            yield from _search(item, depth - 1)
    elif depth > 0 and _is_users(value):
        for item in vars(value).values():
            yield from _search(item, depth - 1)


def _is_users(value: object) -> bool:
    """An object that may hold what its class does not tell."""
    if isinstance(value, (nn.Module, type)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.split(".")[0] not in ("torch", "lightning", "pytorch_lightning", "lightning_embrace")
