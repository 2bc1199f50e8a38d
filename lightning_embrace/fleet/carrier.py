"""What carries messages between a fleet and its tasks' processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lightning_embrace.fleet.protocol import Command, Order, Report


@dataclass(frozen=True)
class Gone:
    """A task's process is no more, and neither is any that it has started.

    Attributes:
        ending: How it ended, in words.
    """

    ending: str


class Carrier(Protocol):
    """Starts processes and carries what they and the fleet say; used by one thread."""

    def start(self, order: Order, device: str | None) -> None:
        """Starts a task's process.

        Args:
            order: What it is to do.
            device: Where it may compute; None: wherever it is granted.
        """

    def send(self, name: str, command: Command) -> None:
        """Tells a task. One that is gone meanwhile hears nothing."""

    def kill(self, name: str) -> None:
        """Ends a task's process at once. It is gone when :meth:`wait` says so."""

    def wait(self, seconds: float) -> list[tuple[str, Report | Gone]]:
        """Waits until a task says something, or some time at most.

        Args:
            seconds: How long.

        Returns:
            By task, in the order in which it was said; the last of a task is that it is gone.
        """

    def close(self) -> None:
        """Ends all processes that are left, and waits until they are gone."""
