"""``python -m lightning_embrace``: LightningCLI with the strategies registered."""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI


def main() -> None:
    """Runs ``fit``, ``validate``, ``test`` or ``predict`` from a config or flags.

    The model is any LightningModule by its class path. So are the data; a model may bring its own loaders instead.
    """
    LightningCLI(
        parser_kwargs={
            "prog": "python -m lightning_embrace",
            "description": "Trains a LightningModule; the strategies embrace* are registered.",
        },
    )
