"""The two names under which Lightning is installed. Their classes are copies that do not know each other."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lightning_utilities.core import rank_zero

#: by namespace, where its strategies are imported from
_PUBLIC = {"lightning.pytorch": "lightning_embrace", "pytorch_lightning": "lightning_embrace.pytorch_lightning"}


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

    @property
    def imported(self) -> bool:
        """Whether the program has imported it already."""
        return self.name in sys.modules

    def get(self, path: str) -> Any:
        """Imports ``path`` below the package: ``"strategies.ParallelStrategy"``."""
        module, _, name = path.rpartition(".")
        return getattr(import_module(f"{self.name}.{module}" if module else self.name), name)

    def get_fabric(self, path: str) -> Any:
        """Imports ``path`` below its Fabric package."""
        module, _, name = path.rpartition(".")
        return getattr(import_module(f"{self.fabric}.{module}"), name)

    def warn(self, message: str) -> None:
        """Warns on every rank that calls it."""
        self.get("utilities.rank_zero.rank_zero_warn")(message)

    def take_messages(self) -> None:
        """Makes this namespace's logger the one of Lightning's rank-zero messages, unless the program has set its own.

        They have one logger for both namespaces. Which one would depend on the order of imports, and a program that
        sets the level of its namespace's logger would be ignored.
        """
        if rank_zero.log.name in [f"{namespace.name}.utilities.rank_zero" for namespace in NAMESPACES]:
            rank_zero.log = logging.getLogger(f"{self.name}.utilities.rank_zero")


LIGHTNING = Namespace("lightning.pytorch", "lightning.fabric")
PYTORCH_LIGHTNING = Namespace("pytorch_lightning", "lightning_fabric")
NAMESPACES = (LIGHTNING, PYTORCH_LIGHTNING)


def other(namespace: Namespace) -> Namespace:
    """The namespace that the given one is not."""
    return PYTORCH_LIGHTNING if namespace is LIGHTNING else LIGHTNING


def shown(strategy: str, namespace: Namespace) -> str:
    """What a Trainer's strategy is called in Lightning's error about one of the other namespace.

    Args:
        strategy: The name of its class.
        namespace: The one whose Trainer takes it.
    """
    there = other(namespace)
    return (
        f"<{strategy} for the Trainer of {namespace.name}; for that of {there.name}: from {_PUBLIC[there.name]} import"
        f" {strategy}>"
    )
