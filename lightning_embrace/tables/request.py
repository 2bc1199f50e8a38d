"""What a rank asks of a table's owners when bags travel pooled."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PooledRequest(NamedTuple):
    """Bags whose sum or mean one rank asked for.

    Attributes:
        ids_L: Ids of all bags one after the other, without padding.
        sizes_B: Number of ids in each bag.
        weights_L: A factor per id, or None.
        mean: Mean instead of sum.
    """

    ids_L: Tensor
    sizes_B: Tensor
    weights_L: Tensor | None
    mean: bool

    def offsets_B(self) -> Tensor:
        """Where each bag starts in ``ids_L``."""
        return self.sizes_B.cumsum(0) - self.sizes_B

    def wire_bytes(self, id_bytes: int, weight_bytes: int) -> int:
        """Bytes in which the request travels to one owner."""
        per_id = id_bytes + (0 if self.weights_L is None else weight_bytes)
        return self.ids_L.numel() * per_id + self.sizes_B.numel() * 4

    def same_as(self, other: PooledRequest) -> bool:
        """Whether both ask for the same vectors."""
        if self.mean != other.mean or (self.weights_L is None) != (other.weights_L is None):
            return False
        pairs = [(self.ids_L, other.ids_L), (self.sizes_B, other.sizes_B), (self.weights_L, other.weights_L)]
        return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)

    def row_gradients(self, grad_Bd: Tensor) -> Tensor:
        """Gradient of each looked-up row from the gradients of the bags, [L, d]."""
        if self.mean:
            grad_Bd = grad_Bd / self.sizes_B.clamp(min=1).unsqueeze(1)
        grad_Ld = grad_Bd.repeat_interleave(self.sizes_B, dim=0)
        return grad_Ld if self.weights_L is None else grad_Ld * self.weights_L.unsqueeze(1)
