"""``python -m lightning_embrace``: LightningCLI with the strategies registered; ``plan``, ``fleet`` and others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from rich.console import Console

from lightning_embrace.checkpoint.agreement import CheckpointError
from lightning_embrace.checkpoint.consolidate import consolidate
from lightning_embrace.dryrun import plan_of
from lightning_embrace.fleet import cli as fleet_cli
from lightning_embrace.hydra.dryrun import planned_of
from lightning_embrace.hydra.render import render_plan
from lightning_embrace.hydra.strategy import HydraMixin

_PROGRAM = "python -m lightning_embrace"


class PlanningTrainer(Trainer):
    """A Trainer with a dry run."""

    def plan(self, model: LightningModule, datamodule: LightningDataModule | None = None) -> None:
        """Shows where each table, or each block under ``hydra``, would live, without making any."""
        console = Console()
        if not console.is_terminal:
            console.width = 180
        if isinstance(self.strategy, HydraMixin):
            planned = planned_of(model, self.strategy.config, self.strategy.root_device, self.strategy.namespace)
            note = "activations are measured in the first step, and the plan is made anew"
            console.print(render_plan(*planned, [note]))
            return
        config = getattr(self.strategy, "config", None)
        tables = "auto" if config is None else config.tables
        console.print(plan_of(model, self.num_devices * self.num_nodes, tables).rendered)


class PlanningCLI(LightningCLI):
    """LightningCLI with ``plan``."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, and ours."""
        return {**LightningCLI.subcommands(), "plan": {"model", "datamodule"}}

    def instantiate_classes(self) -> None:
        """For a dry run the model is built without memory."""
        with torch.device("meta") if self.subcommand == "plan" else nullcontext():
            super().instantiate_classes()


def consolidate_from(arguments: Sequence[str]) -> None:
    """``consolidate DIR FILE``: makes one file of a sharded checkpoint.

    Args:
        arguments: What follows ``consolidate`` on the command line.
    """
    parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} consolidate",
        description="Makes one file of a sharded checkpoint, in ddp's layout. Takes memory for the whole.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="what state_dict_type='sharded', or FSDP, has written")
    parser.add_argument("file", metavar="FILE", type=Path, help="the file to write; it must not exist")
    parser.add_argument(
        "--trusted",
        action="store_true",
        help="read objects of any class, such as hyperparameters of your own: this can run code that is in the folder",
    )
    given = parser.parse_args(arguments)
    try:
        consolidate(given.folder, given.file, weights_only=not given.trusted)
    except (CheckpointError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(f"{given.file} is written.")


def main() -> None:
    """Runs ``fit``, ``validate``, ``test``, ``predict``, ``plan`` or ``fleet`` from a config or flags; ``consolidate``.

    The model is any LightningModule by its class path. So are the data; a model may bring its own loaders instead.
    """
    if sys.argv[1:2] == ["consolidate"]:
        consolidate_from(sys.argv[2:])
        return
    if sys.argv[1:2] == ["fleet"]:
        fleet_cli.main(f"{_PROGRAM} fleet", sys.argv[2:])
        return
    PlanningCLI(
        trainer_class=PlanningTrainer,
        parser_kwargs={
            "prog": _PROGRAM,
            "description": "Trains a LightningModule; the strategies embrace* are registered. Not listed here:"
            " `consolidate DIR FILE` makes one file of a sharded checkpoint, `fleet --config FILE` trains many models.",
        },
    )
