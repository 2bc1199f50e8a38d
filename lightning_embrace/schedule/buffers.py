"""Keeps module buffers equal to rank 0's, as DDP does before a training forward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_embrace.comm.base import Communicator
from lightning_embrace.tables.headers import BITS, Act, act_together


class BufferSync:
    """Broadcasts buffers from rank 0, but only those that some rank has changed since.

    DDP sends every buffer every time; constant ones (causal masks, position ids) are large and never change. Which ones
    did is found by comparing with a copy of what was sent last (version counters miss what is written through
    ``.data``), and agreed right before the broadcast: a buffer may change anywhere between two forward passes.

    Args:
        comm: Carries the broadcasts.
        model: The model, whose buffers are equal on all ranks now.
    """

    def __init__(self, comm: Communicator, model: nn.Module) -> None:
        self._comm = comm
        self._model = model
        self._names = [name for name, _ in model.named_buffers()]
        self._sent: dict[str, Tensor] = {}
        if comm.world_size > 1:
            self._sent = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    @torch.no_grad()
    def sync(self, act: Act = Act.STEP) -> None:
        """Copies rank 0's buffers to all, where any rank has changed them. Collective.

        Args:
            act: What the ranks are about to do.
        """
        if not self._names or self._comm.world_size == 1:
            return
        due = self._agree(self._changed(), act)
        if due:
            buffers = dict(self._model.named_buffers())
            broadcast_tensors(self._comm, [buffers[name] for name in due], "buffers")
            self._sent.update({name: buffers[name].detach().clone() for name in due})

    def _agree(self, changed: set[str], act: Act) -> list[str]:
        """Names that are in any rank's ``changed``; each rank says so with one bit per buffer."""
        blocks = [self._names[i : i + BITS] for i in range(0, len(self._names), BITS)]
        header = [sum(1 << k for k, name in enumerate(block) if name in changed) for block in blocks]
        fields = list(zip(*act_together(self._comm, act, header)))
        return [n for block, bits in zip(blocks, fields) for k, n in enumerate(block) if any(b >> k & 1 for b in bits)]

    def _changed(self) -> set[str]:
        changed: set[str] = set()
        unsure: dict[str, Tensor] = {}
        for name, now in self._model.named_buffers():
            sent = self._sent.get(name)
            if sent is None or (now.shape, now.dtype, now.device) != (sent.shape, sent.dtype, sent.device):
                changed.add(name)
            else:
                unsure[name] = (now != sent).any()
        if unsure:  # one synchronisation with the device for all of them
            verdicts = torch.stack(list(unsure.values())).tolist()
            changed.update(name for name, verdict in zip(unsure, verdicts) if verdict)
        return changed


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
        # as bytes: backends carry fewer dtypes than a model can have
        comm.broadcast(flat.view(torch.uint8), kind, f"{kind} of {dtype}").wait()
        for tensor, piece in zip(group, flat.split([t.numel() for t in group])):
            tensor.copy_(piece.view(tensor.shape))
