"""``python -m lightning_embrace``: LightningCLI with the strategies registered, and with the dry run ``plan``."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from rich.console import Console

from lightning_embrace.dryrun import plan_of
from lightning_embrace.hydra.dryrun import planned_of
from lightning_embrace.hydra.render import render_plan
from lightning_embrace.hydra.strategy import HydraMixin


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


def main() -> None:
    """Runs ``fit``, ``validate``, ``test``, ``predict`` or ``plan`` from a config or flags.

    The model is any LightningModule by its class path. So are the data; a model may bring its own loaders instead.
    """
    PlanningCLI(
        trainer_class=PlanningTrainer,
        parser_kwargs={
            "prog": "python -m lightning_embrace",
            "description": "Trains a LightningModule; the strategies embrace* are registered.",
        },
    )
