"""Tasks of a config: checked against the classes' signatures, and built in their own processes."""

from __future__ import annotations

from functools import partial
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_embrace.fleet.specs import Spec, SpecError
from lightning_embrace.fleet.task import OWNED, OWNED_STRATEGY, Task
from lightning_embrace.hydra.strategy import HydraStrategy

#: built in the task's process; what is for its Trainer is small, and sent as it is
_BUILT_THERE = ("model", "data")


def task_of(name: str, spec: Spec) -> Task:
    """Checks a task. Neither its model nor its data are built.

    Args:
        name: The task's.
        spec: Its parts.

    Raises:
        SpecError: A class or an argument does not exist, is missing, or has a value of another type.
    """
    given = {part: value for part, value in spec.items() if value is not None}
    there = {part: given[part] for part in _BUILT_THERE if part in given}
    here = {part: value for part, value in given.items() if part not in there}
    try:
        _parser(_BUILT_THERE).parse_object(there)
        parser = _parser(("trainer", "strategy"))
        built = _instantiated(parser, parser.parse_object(here))
    except ArgumentError as error:
        raise SpecError(f"task {name!r}: {error}") from error
    # what was not given is the Trainer's, and HydraStrategy's, own default
    arguments = {part: {key: built[part][key] for key in here.get(part, {})} for part in ("trainer", "strategy")}
    loaders = partial(_build, "data", there["data"]) if "data" in there else None
    return Task(partial(_build, "model", there["model"]), loaders, arguments["trainer"], name, arguments["strategy"])


def _parser(parts: tuple[str, ...]) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    if "model" in parts:
        parser.add_subclass_arguments(LightningModule, "model", fail_untyped=False, required=True)
    if "data" in parts:
        parser.add_subclass_arguments(LightningDataModule, "data", fail_untyped=False, required=False)
    for part, kind, owned in (("trainer", Trainer, OWNED), ("strategy", HydraStrategy, OWNED_STRATEGY)):
        if part in parts:
            parser.add_class_arguments(kind, part, fail_untyped=False, instantiate=False, skip=set(owned))
    return parser


def _build(part: str, spec: Any) -> Any:
    """In the task's process."""
    parser = _parser((part,))
    return _instantiated(parser, parser.parse_object({part: spec}))[part]


def _instantiated(parser: ArgumentParser, parsed: Namespace) -> Namespace:
    new = getattr(parser, "instantiate", None)  # since jsonargparse 4.49
    built: Namespace = (new or parser.instantiate_classes)(parsed)
    return built
