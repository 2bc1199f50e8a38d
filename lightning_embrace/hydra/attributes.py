"""What the modules of a block keep in attributes, as it was before a run."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_embrace.hydra.graphs import leaf_of

#: what torch itself keeps there
_TORCH = (frozenset(vars(nn.Module())) | {"_compiled_call_impl"}) - {"training"}
#: what may change while it stays the same object
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)


class Moment(NamedTuple):
    """Attributes at one moment.

    Attributes:
        values: By module.
        versions: By module and name, how often a tensor had been changed in place.
    """

    values: list[dict[str, Any]]
    versions: dict[tuple[int, str], int]


class Attributes:
    """Attributes of a block: whether it trains, what it counts, what it keeps for others to look at.

    Args:
        block: The block.
        refuse: Is given an attribute's path, and raises: gradients flow through a tensor that is handed over in it.
    """

    def __init__(self, block: nn.Module, refuse: Callable[[str], None]) -> None:
        self._names, self._parts = zip(*block.named_modules())
        self._refuse = refuse

    @contextmanager
    def cut(self) -> Iterator[Moment]:
        """Inside, tensors in attributes are not part of the graph outside.

        Returns:
            Attributes as they are now.
        """
        cut: list[tuple[dict[str, Any], str, object, object]] = []
        for index, part in enumerate(self._parts):
            for name, value in _own(part).items():
                inner = self._without_graph(value, self.path(index, name))
                if inner is not value:
                    vars(part)[name] = inner
                    cut.append((vars(part), name, inner, value))
        try:
            yield self._now()
        finally:
            for attributes, name, inner, value in cut:
                if attributes.get(name) is inner:
                    attributes[name] = value

    @contextmanager
    def as_before(self, moment: Moment) -> Iterator[None]:
        """Inside, attributes are what they were at a moment; afterwards they are again what they are now."""
        now = [_own(part) for part in self._parts]
        for part, values in zip(self._parts, moment.values):
            _set(part, values, copied=True)
        try:
            yield
        finally:
            for part, values in zip(self._parts, now):
                _set(part, values)

    def changed_in_place(self, moment: Moment) -> str | None:
        """The path of a tensor that was changed in place since."""
        for (index, name), version in moment.versions.items():
            if moment.values[index][name]._version != version:
                return self.path(index, name)
        return None

    def path(self, index: int, name: str) -> str:
        """For people."""
        return f"{self._names[index]}.{name}" if self._names[index] else name

    def _now(self) -> Moment:
        values = [{name: _copied(value) for name, value in _own(part).items()} for part in self._parts]
        versions = {
            (index, name): value._version
            for index, named in enumerate(values)
            for name, value in named.items()
            if isinstance(value, Tensor) and not value.is_inference()
        }
        return Moment(values, versions)

    def _without_graph(self, value: Any, path: str) -> Any:
        def inner(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                return leaf_of(leaf, lambda: self._refuse(path))
            return leaf

        if isinstance(value, Tensor):
            return inner(value)
        if type(value) in (list, tuple) and any(isinstance(v, Tensor) and v.grad_fn is not None for v in value):
            return type(value)(map(inner, value))
        if type(value) is dict and any(isinstance(v, Tensor) and v.grad_fn is not None for v in value.values()):
            return {key: inner(v) for key, v in value.items()}
        return value


def _own(part: nn.Module) -> dict[str, Any]:
    """Attributes that are not torch's, nor set anew by its hooks: ``spectral_norm``, ``weight_norm``."""
    attributes = vars(part)
    names = attributes.keys() - _TORCH
    if part._forward_pre_hooks:
        names -= {getattr(hook, "name", None) for hook in part._forward_pre_hooks.values()}
    return {name: attributes[name] for name in names}


def _set(part: nn.Module, values: dict[str, Any], copied: bool = False) -> None:
    """Most have not changed, and nothing is done then."""
    attributes, now = vars(part), _own(part)
    if now.keys() == values.keys() and all(now[name] is value for name, value in values.items()):
        return
    for name in now.keys() - values.keys():
        del attributes[name]
    attributes.update({name: _copied(value) for name, value in values.items()} if copied else values)


def _copied(value: Any) -> Any:
    return copy.copy(value) if type(value) in _CONTAINERS else value
