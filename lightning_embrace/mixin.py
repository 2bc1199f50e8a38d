"""What the parts of a strategy derive from: the real base comes from one of the two namespaces of Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as Base
else:
    Base = object

__all__ = ["Base"]
