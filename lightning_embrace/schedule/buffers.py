"""Keeps module buffers equal to rank 0's, as DDP does before every training forward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_embrace.comm.base import Communicator

# buffers per header field: an int64 holds 63 bits without its sign
_BITS = 62


class BufferSync:
    """Broadcasts buffers from rank 0, but only those that some rank has changed since.

    DDP sends every buffer in every step; constant ones (causal masks, position ids) are large and never change. Whether
    one did is agreed in the closing header of the step before, so no rank decides alone.

    Args:
        comm: Carries the broadcasts.
        model: The model.
    """

    def __init__(self, comm: Communicator, model: nn.Module) -> None:
        self._comm = comm
        self._model = model
        self._names = [name for name, _ in model.named_buffers()]
        self._seen: dict[str, tuple[int, int]] = {}
        self._due: set[str] = set(self._names)

    @property
    def header_size(self) -> int:
        """Number of header fields."""
        return -(-len(self._names) // _BITS)

    def header(self) -> list[int]:
        """Bits of the buffers that this rank has changed."""
        now = self._states()
        changed = [name in now and now[name] != self._seen.get(name) for name in self._names]
        return [
            sum(1 << k for k, bit in enumerate(changed[i : i + _BITS]) if bit) for i in range(0, len(changed), _BITS)
        ]

    def agree(self, headers: list[list[int]]) -> None:
        """Notes what any rank has changed; it travels before the next forward pass.

        Args:
            headers: Every rank's :meth:`header`.
        """
        for row in headers:
            for number, bits in enumerate(row):
                names = self._names[number * _BITS : (number + 1) * _BITS]
                self._due.update(name for k, name in enumerate(names) if bits >> k & 1)

    @torch.no_grad()
    def broadcast(self) -> None:
        """Copies rank 0's agreed buffers to all. Collective."""
        if self._due:
            buffers = dict(self._model.named_buffers())
            due = [buffers[name] for name in self._names if name in self._due and name in buffers]
            broadcast_tensors(self._comm, due, "buffers")
            self._due = set()
        self._seen = self._states()

    def _states(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._model.named_buffers()}


@torch.no_grad()
def broadcast_tensors(comm: Communicator, tensors: list[Tensor], kind: str) -> None:
    """Copies rank 0's tensors to all ranks, one message per dtype. Collective.

    Args:
        comm: Carries the broadcasts.
        tensors: Dense tensors, alike on every rank.
        kind: What the traffic counts as.
    """
    if comm.world_size == 1:
        return
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        group = [t for t in tensors if t.dtype == dtype and t.numel() > 0]
        if not group:
            continue
        flat = torch.cat([t.detach().reshape(-1).to(comm.device) for t in group])
        wire = flat.view(torch.uint8) if dtype == torch.bool else flat
        comm.broadcast(wire, kind, f"{kind} of {dtype}").wait()
        for tensor, piece in zip(group, flat.split([t.numel() for t in group])):
            tensor.copy_(piece.view(tensor.shape))
