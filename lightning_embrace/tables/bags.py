"""Bags of ids in one form, and the choice between pooled vectors and rows on the wire."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_embrace.tables.request import PooledRequest
from lightning_embrace.tables.table import ShardedTable


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
        include_last_offset: ``offsets`` ends with the end of the last bag; ids behind it are in no bag.

    Returns:
        The request.

    Raises:
        ValueError: The arguments do not fit each other, as torch has it.
    """
    if weights is not None and weights.shape != input.shape:
        raise ValueError(
            f"embedding_bag: per_sample_weights ({tuple(weights.shape)}) must have the same shape as the input"
            f" ({tuple(input.shape)})"
        )
    if input.dim() == 2:
        if offsets is not None:
            raise ValueError("if input is 2D, then offsets has to be None, as input is treated as bags of equal length")
        sizes_B = torch.full((input.shape[0],), input.shape[1], dtype=torch.int64, device=input.device)
    elif input.dim() == 1:
        sizes_B = _sizes(offsets, input.numel(), include_last_offset)
    else:
        raise ValueError(f"input has to be 1D or 2D Tensor, but got Tensor of dimension {input.dim()}")
    bag_L = torch.arange(sizes_B.numel(), device=input.device).repeat_interleave(sizes_B)
    ids_L = input.reshape(-1)[: bag_L.numel()].long()
    weights_L = None if weights is None else weights.reshape(-1)[: bag_L.numel()]
    if padding_idx is not None:
        keep_L = ids_L != padding_idx
        ids_L, bag_L = ids_L[keep_L], bag_L[keep_L]
        weights_L = None if weights_L is None else weights_L[keep_L]
        sizes_B = torch.bincount(bag_L, minlength=sizes_B.numel())
    return PooledRequest(ids_L, sizes_B, weights_L, mean)


def _sizes(offsets: Tensor | None, count: int, include_last_offset: bool) -> Tensor:
    """Number of ids in each bag of a flat input of ``count`` ids."""
    if offsets is None or offsets.dim() != 1:
        raise ValueError("offsets has to be a 1D Tensor" + (" but got None" if offsets is None else ""))
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"offsets must be int32 or int64, but got {offsets.dtype}")
    bounds = offsets.long()
    if not include_last_offset:
        bounds = torch.cat([bounds, bounds.new_tensor([count])])
    elif offsets.numel() == 0:
        raise ValueError("include_last_offset: number of offset should be at least 1")
    sizes_B = bounds.diff()
    starts_late = count > 0 and int(bounds[0]) != 0
    if starts_late or int(bounds[-1]) > count or bool((sizes_B < 0).any()):
        raise ValueError(
            f"offsets must begin with 0, not decrease and not exceed the {count} ids of the input, but got"
            f" {offsets.tolist()}"
        )
    return sizes_B


def pooled_is_smaller(request: PooledRequest, ids_U: Tensor, table: ShardedTable, backward: bool) -> bool:
    """Whether one vector per bag is fewer bytes than the rows of the bags' ids that are not here yet.

    ```
    what          to every other owner            from it, and its gradient back
    rows          id · M                          M · width
    pooled        (id + weight) · L + 4 · B       B · width
    ```

    Rows that are here already are not fetched again, and their gradient travels once for all look-ups.

    Args:
        request: The bags.
        ids_U: Their unique ids.
        table: Their table, whose window says which rows are here already.
        backward: Gradients will travel back.

    Returns:
        True when the bags should travel pooled.
    """
    others = [r for r in table.owners() if r != table.rank]
    missing = table.window.missing(ids_U).numel()
    vector = sum(table.widths[r] for r in others) * table.row_dtype.itemsize * (2 if backward else 1)
    id_bytes = table.id_dtype.itemsize
    asking = request.wire_bytes(id_bytes, table.parameter.dtype.itemsize)
    rows = missing * (vector + len(others) * id_bytes)
    return request.sizes_B.numel() * vector + len(others) * asking < rows
