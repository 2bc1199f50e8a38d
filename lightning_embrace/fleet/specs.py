"""A fleet's config file: which tasks follow from it. Plain data only; nothing is imported or built here."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_embrace.fleet.layout import task_name

#: what a task consists of
PARTS = ("model", "data", "trainer", "strategy")
Spec = dict[str, Any]


class SpecError(ValueError):
    """The config cannot be meant so."""


def specs_of(common: Mapping[str, Any], tasks: Sequence[Any], grid: Mapping[str, Sequence[Any]]) -> dict[str, Spec]:
    """Each task of a fleet, whole.

    Args:
        common: Parts that all tasks have, by name.
        tasks: What is particular to each: parts, and ``name``. Without any there is one task, of what is common.
        grid: Values by dotted key, such as ``model.init_args.lr``. Each task is made once for each combination.

    Returns:
        Parts of each task by its name.

    Raises:
        SpecError: A key is none of these, or names are not different.
    """
    found: dict[str, Spec] = {}
    short = _short(list(grid))
    for index, given in enumerate(tasks or [{}]):
        if not isinstance(given, Mapping) or set(given) - {*PARTS, "name"}:
            raise SpecError(f"tasks[{index}] is {given!r}. Write a mapping; allowed are name, {', '.join(PARTS)}.")
        base = _merged(common, {part: given[part] for part in PARTS if part in given})
        for values in itertools.product(*(_values(key, grid[key]) for key in grid)):
            spec = copy.deepcopy(base)
            for key, value in zip(grid, values):
                _put(spec, key, value)
            parts = [str(given["name"])] if "name" in given else [f"task-{index}"] if len(tasks) > 1 or not grid else []
            name = task_name(",".join([*parts, *(f"{short[key]}={value}" for key, value in zip(grid, values))]))
            if name in found:
                raise SpecError(f"tasks: two are named {name!r}. Give each another name.")
            found[name] = spec
    return found


def _values(key: str, values: Any) -> Sequence[Any]:
    if isinstance(values, (str, Mapping)) or not isinstance(values, Sequence) or not values:
        raise SpecError(f"grid: {key} is {values!r}. Write a list of values.")
    return values


def _short(keys: list[str]) -> dict[str, str]:
    """The last word of each key, or all of it where another one ends alike."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends)}


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> Spec:
    """Mappings are merged key by key, but for arguments of different classes."""
    result = dict(low)
    other_class = "class_path" in high and high["class_path"] != low.get("class_path")
    if other_class:
        result.pop("init_args", None)
    for key, value in high.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def _put(spec: Spec, key: str, value: Any) -> None:
    *path, last = key.split(".")
    if not path or path[0] not in PARTS:
        raise SpecError(
            f"grid: {key!r} is no argument of a task. Begin it with {', '.join(PARTS)}: model.init_args.lr."
        )
    at = spec
    for word in path:
        at = at.setdefault(word, {})
        if not isinstance(at, dict):
            raise SpecError(f"grid: {key!r} goes through {word!r}, which is {at!r} and has no arguments of its own.")
    at[last] = value
