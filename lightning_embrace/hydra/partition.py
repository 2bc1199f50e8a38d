"""Which modules of a model are its blocks, and what else it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

#: a list of blocks has at least this share of the model's parameters
_SHARE = 0.05
_LISTS = (nn.ModuleList, nn.Sequential)
#: what is never called
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class NamedBlock:
    """One block.

    Attributes:
        name: Its first name in the model.
        module: The block.
        parameters: Its own: nobody outside of blocks has them.
    """

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True)
class Partition:
    """A model in parts.

    Attributes:
        blocks: In the order in which the model lists them.
        units: Indices of blocks that share parameters, and are one shard therefore; most are single.
        glue: All other parameters.
    """

    blocks: tuple[NamedBlock, ...]
    units: tuple[tuple[int, ...], ...]
    glue: tuple[nn.Parameter, ...]


def divide(
    model: nn.Module, patterns: Literal["auto"] | Sequence[str] = "auto", glue_room: int | None = None
) -> Partition:
    """Finds a model's blocks.

    Args:
        model: The model.
        patterns: ``"auto"``: the members of its large ModuleLists and Sequentials. Or fnmatch patterns: a module that
            one matches is a block; if it is a ModuleList or a Sequential, its members are. ``"!name"`` excludes a
            module and its parts; where there is nothing else, from what ``"auto"`` finds.
        glue_room: Bytes for everything else, with gradients. Where that is not enough, its largest layers (embeddings,
            a head) are blocks too. None: there is room.

    Returns:
        The parts.

    Raises:
        ValueError: A pattern matches no module that has parameters.
    """
    chosen = () if patterns == "auto" else tuple(patterns)
    wanted = [p for p in chosen if not p.startswith("!")]
    excluded = [p[1:] for p in chosen if p.startswith("!")]
    named: dict[int, tuple[str, nn.Module]] = {}
    for name, module in _matching(model, wanted) if wanted else _dominant(model):
        if not _is_any(name, excluded):
            named.setdefault(id(module), (name, module))
    glue = _outside(model, named)
    for leaves in _largest_leaves(model, named):
        if glue_room is None or trained_bytes(glue.values()) <= glue_room:
            break
        if not any(_is_any(name, excluded) for name, _ in leaves):
            named.update((id(module), (name, module)) for name, module in leaves)
            glue = _outside(model, named)
    order = {id(module): place for place, module in enumerate(model.modules())}
    blocks = []
    for name, module in sorted(named.values(), key=lambda pair: order[id(pair[1])]):
        own = tuple(p for p in module.parameters() if id(p) not in glue)
        if own:
            blocks.append(NamedBlock(name, module, own))
    return Partition(tuple(blocks), tuple(_units(blocks)), tuple(glue.values()))


def trained_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of parameters, and of the gradients that they can have."""
    return sum(p.nbytes * (2 if p.requires_grad else 1) for p in parameters)


def _outside(model: nn.Module, named: Mapping[int, tuple[str, nn.Module]]) -> dict[int, nn.Parameter]:
    """By ``id``, the parameters that some module outside of blocks has."""
    return {id(p): p for _, part in _modules_outside(model, named) for p in part.parameters(recurse=False)}


def _modules_outside(model: nn.Module, named: Mapping[int, tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """With their names, modules that can be reached past blocks, though they may be parts of blocks as well."""
    seen = set(named)

    def visit(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module
            for name, child in module.named_children():
                yield from visit(child, f"{path}.{name}" if path else name)

    return visit(model, "")


def _largest_leaves(
    model: nn.Module, named: Mapping[int, tuple[str, nn.Module]]
) -> Iterator[list[tuple[str, nn.Module]]]:
    """Layers outside of blocks, the largest first; those that share parameters together."""
    outside = _modules_outside(model, named)
    leaves = [
        (name, m)
        for name, m in outside
        if name and _weight(m) and not list(m.children()) and not isinstance(m, _CONTAINERS)
    ]
    for name, module in sorted(leaves, key=lambda pair: -_weight(pair[1])):
        mine = {id(p) for p in module.parameters()}
        others = [leaf for leaf in leaves if leaf[1] is not module and mine & {id(p) for p in leaf[1].parameters()}]
        yield [(name, module), *others]


def _dominant(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    least = _SHARE * _weight(model)

    def visit(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            here = f"{path}.{name}" if path else name
            if isinstance(child, _LISTS) and len(child) > 1 and _weight(child) >= least:
                yield from members(child, here)
            else:
                yield from visit(child, here)

    def members(blocks: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in blocks.named_children():
            here = f"{path}.{name}"
            large = _weight(child) > _weight(model) / 2
            inner = [] if not large else list(visit(child, here))
            if isinstance(child, nn.ModuleList) or (large and isinstance(child, nn.Sequential) and len(child) > 1):
                yield from members(child, here)
            elif isinstance(child, _CONTAINERS):
                yield from visit(child, here)
            elif sum(_weight(module) for _, module in inner) > 0.8 * _weight(child):
                yield from inner
            else:
                yield here, child

    return visit(model, "")


def _matching(model: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    taken: list[str] = []
    for pattern in patterns:
        matched = False
        for name, module in model.named_modules():
            if not name or not fnmatchcase(name, pattern) or _weight(module) == 0:
                continue
            matched = True
            if any(name == t or name.startswith(f"{t}.") for t in taken):
                continue
            parts = [(name, module)]
            if isinstance(module, _LISTS):
                parts = [(f"{name}.{n}", child) for n, child in module.named_children()]
            for part in parts:
                taken.append(part[0])
                yield part
        if not matched:
            names = [n for n, m in model.named_modules() if isinstance(m, _LISTS)]
            raise ValueError(
                f"HydraStrategy(blocks={list(patterns)!r}): {pattern!r} matches no module with parameters."
                f" The model's lists are {', '.join(map(repr, names)) or 'none'}."
            )


def _is_any(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a module, or one that it is a part of."""
    parts = name.split(".")
    wholes = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return any(fnmatchcase(whole, pattern) for whole in wholes for pattern in patterns)


def _units(blocks: Sequence[NamedBlock]) -> Iterator[tuple[int, ...]]:
    """Blocks that share a parameter, directly or through others, go together."""
    first: dict[int, int] = {}
    root = list(range(len(blocks)))

    def find(index: int) -> int:
        while root[index] != index:
            index = root[index]
        return index

    for index, block in enumerate(blocks):
        for parameter in block.parameters:
            other = find(first.setdefault(id(parameter), index))
            mine = find(index)
            root[max(mine, other)] = min(mine, other)
    for index in range(len(blocks)):
        if find(index) == index:
            yield tuple(i for i in range(len(blocks)) if find(i) == index)


def _weight(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())
