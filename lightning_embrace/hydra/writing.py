"""A checkpoint of a spilled model, as plain training writes it, put together while it is written.

While the Trainer collects what is to be saved, tensors that are in the store are holes. The file is written without
them; then the store is read through once, and each tensor goes to its place in the file, in pieces.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_embrace.checkpoint.archive import write_archive
from lightning_embrace.checkpoint.atomic import written_whole
from lightning_embrace.checkpoint.filling import check_disk, fill
from lightning_embrace.checkpoint.hole import Hole
from lightning_embrace.hydra.session import Session
from lightning_embrace.hydra.stored import Stored

_CURE = "`state_dict()` of any module has them outside of saving; an `on_save_checkpoint` hook is given them."


class StreamedSave:
    """What one file is made of, from the first state dict to the last byte.

    Args:
        session: The model's.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._numbers: dict[Stored, int] = {}

    @property
    def hollow(self) -> bool:
        """Whether there is something to fill."""
        return bool(self._numbers)

    def leave_parameter(self, parameter: nn.Parameter) -> Tensor | None:
        """A hole for a parameter that is in the store; None for others."""
        stored = self._session.find(parameter)
        return None if stored is None else self.leave(stored)

    def leave(self, stored: Stored) -> Hole:
        """A hole; tied weights, which are one tensor, are one in the file."""
        number = self._numbers.setdefault(stored, len(self._numbers))
        size, stride, dtype = stored.shape
        hole = Hole.of(stored.unit.name, _CURE, number, size, dtype, stride)
        hole.read = partial(stored.read_rows, self._session.transfer)
        return hole

    def write(self, content: Any, path: str) -> None:
        """Writes the file. One piece of one tensor is in memory at a time, beside what is on the device.

        Args:
            content: What is to be saved.
            path: Where.

        Raises:
            OSError: It could not be written. What was there before is as it was.
        """
        transfer = self._session.transfer
        places = {number: stored for stored, number in self._numbers.items()}
        with written_whole(path) as file:
            rooms = write_archive(file, content)
            check_disk(file.fileno(), sum(hole.content_bytes for hole, _ in rooms))
            order = {unit: place for place, unit in enumerate(self._session.units)}
            # in the store's order: what is near is read together
            for hole, room in sorted(rooms, key=lambda pair: _where(places[pair[0].number], order)):
                fill(file, room, places[hole.number].pieces(transfer))


def _where(stored: Stored, order: dict[Any, int]) -> tuple[int, bool, int]:
    return order[stored.unit], stored.section == "states", stored.number
