"""``python -m lightning_embrace fleet``: trains the tasks of a config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace  # type: ignore[attr-defined]
from rich.console import Console

from lightning_embrace.fleet.configured import task_of
from lightning_embrace.fleet.fleet import HydraFleet
from lightning_embrace.fleet.halving import SuccessiveHalving
from lightning_embrace.fleet.results import render_results
from lightning_embrace.fleet.specs import PARTS, SpecError, specs_of

_DESCRIPTION = """Trains many models on a few devices, each in a process of its own under hydra. Each of `tasks` has
model and data (class_path, init_args), trainer and strategy (arguments); what all have in common may be given once,
beside `tasks`. `grid` makes each task once for each combination of values. The exit status is 1 if a task has failed.
"""


def main(program: str, arguments: Sequence[str]) -> None:
    """Trains, prints what has come of it, and exits with 1 if a task has failed, with 130 if it was interrupted.

    Args:
        program: As the user calls it.
        arguments: What follows on the command line.
    """
    parser = _parser(program)
    chosen = parser.parse_args(list(arguments))
    try:
        fleet = fleet_of(chosen)
    except (SpecError, ValueError, TypeError) as error:
        parser.error(str(error))
    try:
        results = fleet.fit(resume=chosen.resume)
    except (ValueError, RuntimeError) as error:  # the folder is another fleet's
        parser.exit(2, f"{program}: {error}\n")
    except KeyboardInterrupt as interrupt:
        parser.exit(130, f"{program}: {interrupt}\n")
    console = Console()
    console.print(render_results(results))
    failed = [result for result in results if result.error is not None]
    for result in failed:
        console.print(f"{result.name}: {result.error}", markup=False, highlight=False, soft_wrap=True)
    parser.exit(1 if failed else 0)


def fleet_of(chosen: Namespace) -> HydraFleet:
    """Makes a fleet of what was parsed.

    Args:
        chosen: By the parser of :func:`main`.

    Raises:
        ValueError: Tasks or the fleet's arguments cannot be meant so.
        TypeError: A task cannot be sent to a process of its own.
    """
    given = chosen.as_dict()
    own: dict[str, Any] = {key: given.pop(key) for key in (*PARTS, "tasks", "grid")}
    common = {part: own[part] for part in PARTS if own[part] is not None}
    specs = specs_of(common, own["tasks"] or [], own["grid"] or {})
    arguments = {key: value for key, value in given.items() if key not in ("config", "resume")}
    if arguments["halving"] is not None:
        arguments["halving"] = SuccessiveHalving(**arguments["halving"])
    return HydraFleet([task_of(name, spec) for name, spec in specs.items()], **arguments)


def _parser(program: str) -> ArgumentParser:
    parser = ArgumentParser(prog=program, description=_DESCRIPTION)
    parser.add_argument("--config", action=ActionConfigFile, help="a YAML file with any of the arguments below")
    parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
    for part in PARTS:
        parser.add_argument(f"--{part}", type=dict[str, Any] | None, help=f"the {part} of every task, or some of it")
    parser.add_argument("--tasks", type=list[dict[str, Any]] | None, help="tasks: name, and what is not common to all")
    parser.add_argument("--grid", type=dict[str, list[Any]] | None, help="values by key, such as model.init_args.lr")
    parser.add_class_arguments(HydraFleet, skip={"tasks"})
    return parser
