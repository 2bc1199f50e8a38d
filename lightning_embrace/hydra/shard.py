"""What is on the device at one time: neighbouring units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lightning_embrace.hydra.unit import Unit

if TYPE_CHECKING:
    from lightning_embrace.hydra.transfer import Slot


class Shard:
    """Units that are moved together.

    Args:
        index: Its place in the plan.
        units: In forward order.
    """

    def __init__(self, index: int, units: Sequence[Unit]) -> None:
        self.index = index
        self.units = tuple(units)
        #: where it is on the device, or None
        self.slot: Slot | None = None
        #: calls on the tape whose backward is still to come
        self.pending = 0
        #: its parameters have been updated in this step
        self.stepped = False
        #: its gradients are on the device's account
        self.charged = 0

    @property
    def name(self) -> str:
        """For people."""
        first, last = self.units[0].name, self.units[-1].name
        return first if first == last else f"{first} … {last}"

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """All of them."""
        for unit in self.units:
            yield from unit.parameters

    @property
    def weight_bytes(self) -> int:
        """Of its parameters, in whole pages."""
        return sum(unit.weights.nbytes for unit in self.units)

    @property
    def state_bytes(self) -> int:
        """Of what the optimizer keeps for them, in whole pages."""
        return sum(unit.states.nbytes for unit in self.units)

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients that there can be."""
        return sum(unit.gradient_bytes for unit in self.units)

    @property
    def nbytes(self) -> int:
        """What it takes of a slot."""
        return self.weight_bytes + self.state_bytes

    def weights_in(self, memory: Tensor) -> list[tuple[Unit, Tensor]]:
        """Each unit's weights in a slot: they come first."""
        return _portions([(unit, unit.weights.nbytes) for unit in self.units], memory, 0)

    def states_in(self, memory: Tensor) -> list[tuple[Unit, Tensor]]:
        """Each unit's optimizer states in a slot: they follow."""
        return _portions([(unit, unit.states.nbytes) for unit in self.units], memory, self.weight_bytes)

    def has_gradients(self) -> bool:
        """Whether there are any, on the device or in the store."""
        return any(unit.has_gradients() for unit in self.units)


def _portions(sizes: Sequence[tuple[Unit, int]], memory: Tensor, start: int) -> list[tuple[Unit, Tensor]]:
    portions = []
    for unit, nbytes in sizes:
        portions.append((unit, memory[start : start + nbytes]))
        start += nbytes
    return portions
