"""What communicators have in common that carry exchanges to other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from lightning_embrace.comm.control import Control
from lightning_embrace.comm.traffic import Traffic
from lightning_embrace.comm.urgent import Urgent

# the longest pause between two looks at an exchange that gives no other sign
_POLL_SECONDS = 1e-3


class CountingCommunicator:
    """Counts what travels, knows what is urgent, and tells the control channel of steps and failures.

    Args:
        rank: This process' rank.
        world_size: Number of ranks.
        device: Where exchanged tensors live.
        control: The channel on which ranks report failures.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, control: Control) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.traffic = Traffic()
        self.control = control
        self._urgent = Urgent()
        self._counting = threading.Lock()

    def at_step(self, step: int) -> None:
        """Notes the step, for errors."""
        self.control.at_step(step)

    def give_way(self, seconds: float, rate: float = 0.0) -> None:
        """See :class:`~lightning_embrace.comm.base.Communicator`."""
        self._urgent.wait(seconds, rate)

    def fail(self, error: BaseException) -> None:
        """See :class:`~lightning_embrace.comm.base.Communicator`."""
        self.control.fail_here(error)

    def _count(self, kind: str, sent: int, received: int) -> None:
        with self._counting:  # low-priority exchanges are issued by a thread of their own
            self.traffic.add(kind, sent, received)


def look_until(is_done: Callable[[], bool], between: Callable[[], None]) -> None:
    """Waits for an exchange by looking, in pauses that grow to a millisecond.

    Args:
        is_done: Whether it has ended.
        between: Called before each pause; raises where waiting is in vain.
    """
    pause = 0.0
    while not is_done():
        between()
        time.sleep(pause)
        pause = min(pause + _POLL_SECONDS / 20, _POLL_SECONDS)
