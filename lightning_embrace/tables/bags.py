"""Bags of ids in one form, and the choice between pooled vectors and rows on the wire."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_embrace.tables.table import PooledRequest, ShardedTable


def to_bags(
    input: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    mean: bool,
    padding_idx: int | None,
    include_last_offset: bool,
) -> PooledRequest:
    """Brings the arguments of ``nn.EmbeddingBag.forward`` into one form, without padding.

    Args:
        input: Ids, [B, L] without offsets, [n] with.
        offsets: Start of each bag.
        weights: A factor per id, shaped as ``input``.
        mean: Mean instead of sum.
        padding_idx: Id that counts for nothing.
        include_last_offset: ``offsets`` ends with the end of the last bag.

    Returns:
        The request.

    Raises:
        ValueError: ``input`` and ``offsets`` do not fit each other, as torch has it.
    """
    if input.dim() == 2:
        if offsets is not None:
            raise ValueError("if input is 2D, then offsets has to be None, as input is treated as bags of equal length")
        bag = torch.arange(input.shape[0], device=input.device).repeat_interleave(input.shape[1])
        count = input.shape[0]
    else:
        if offsets is None or input.dim() != 1:
            raise ValueError("input has to be 1D with offsets, or 2D without")
        starts = offsets[:-1] if include_last_offset else offsets
        count = starts.numel()
        ends = torch.cat([starts[1:], starts.new_tensor([input.numel()])])
        if include_last_offset:
            ends[-1:] = offsets[-1:]
        bag = torch.arange(count, device=input.device).repeat_interleave(ends.long() - starts.long())
    ids = input.reshape(-1)[: bag.numel()].long()
    factors = None if weights is None else weights.reshape(-1)[: bag.numel()]
    if padding_idx is not None:
        keep = ids != padding_idx
        ids, bag = ids[keep], bag[keep]
        factors = None if factors is None else factors[keep]
    return PooledRequest(ids, torch.bincount(bag, minlength=count), factors, mean)


def pooled_is_smaller(request: PooledRequest, table: ShardedTable) -> bool:
    """Whether one vector per bag is fewer bytes than one row per unique id, over forward and backward.

    Args:
        request: The bags.
        table: Their table, whose window says which rows are here already.

    Returns:
        True when the bags should travel pooled.
    """
    world_size = len(table.widths)
    unique_U = torch.unique(request.ids_L)
    vector = table.columns * table.row_dtype.itemsize
    # vectors go to and come from each rank in part, ids go to every rank whole
    rows = (table.window.missing(unique_U).numel() + unique_U.numel()) * vector
    row_ids = world_size * unique_U.numel() * table.id_dtype.itemsize
    pooled = 2 * request.sizes_B.numel() * vector
    factor = 0 if request.weights_L is None else table.parameter.dtype.itemsize
    pooled_ids = world_size * (request.ids_L.numel() * (table.id_dtype.itemsize + factor) + 4 * request.sizes_B.numel())
    return bool(pooled + pooled_ids < rows + row_ids)
