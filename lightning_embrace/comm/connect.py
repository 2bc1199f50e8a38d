"""Connects the ranks: control channel, communicator and row service."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_embrace.comm.base import Communicator, LocalCommunicator
from lightning_embrace.comm.control import Control, Hub
from lightning_embrace.comm.torch_backend import TorchCommunicator


class Connection:
    """What one rank holds of the others, made on top of an initialised default process group. Collective.

    Args:
        rank: This process' rank.
        world_size: Number of ranks.
        device: Where exchanged tensors live.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: How long one exchange may take.
        main_address: Where rank 0 can be reached.
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device, backend: str, timeout: timedelta, main_address: str
    ) -> None:
        self.control = Control(0, 1)
        self.communicator: Communicator = LocalCommunicator(device)
        if world_size == 1:
            return
        hub = Hub(world_size, host=main_address) if rank == 0 else None
        meeting = [(hub.port, hub.token) if hub is not None else None]
        dist.broadcast_object_list(meeting, src=0)
        assert meeting[0] is not None
        port, token = meeting[0]
        self.control = Control(rank, world_size, main_address, port, token, hub)
        self.communicator = TorchCommunicator(rank, world_size, device, backend, timeout, self.control)

    def close(self) -> None:
        """Ends in good order. Call it when no exchange is under way on any rank."""
        if isinstance(self.communicator, TorchCommunicator):
            self.communicator.close()
        self.abandon()

    def abandon(self) -> None:
        """Ends after a failure: no collective, no waiting for others."""
        self.control.close()
