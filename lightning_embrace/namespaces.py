"""The two names under which Lightning is installed. Their classes are copies that do not know each other."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Namespace:
    """One installed name of Lightning.

    Attributes:
        name: ``"lightning.pytorch"`` or ``"pytorch_lightning"``.
        fabric: The Fabric package that belongs to it.
    """

    name: str
    fabric: str

    @property
    def installed(self) -> bool:
        """Whether it can be imported."""
        return find_spec(self.name.partition(".")[0]) is not None

    def get(self, path: str) -> Any:
        """Imports ``path`` below the package: ``"strategies.ParallelStrategy"``."""
        module, _, name = path.rpartition(".")
        return getattr(import_module(f"{self.name}.{module}" if module else self.name), name)

    def get_fabric(self, path: str) -> Any:
        """Imports ``path`` below its Fabric package."""
        module, _, name = path.rpartition(".")
        return getattr(import_module(f"{self.fabric}.{module}"), name)


LIGHTNING = Namespace("lightning.pytorch", "lightning.fabric")
PYTORCH_LIGHTNING = Namespace("pytorch_lightning", "lightning_fabric")


def other(namespace: Namespace) -> Namespace:
    """The namespace that the given one is not."""
    return PYTORCH_LIGHTNING if namespace is LIGHTNING else LIGHTNING
