"""``python -m lightning_embrace``: LightningCLI with the strategies registered."""

from __future__ import annotations

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI


def main() -> None:
    """Runs ``fit``, ``validate``, ``test`` or ``predict`` from a config or flags."""
    LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
    )
