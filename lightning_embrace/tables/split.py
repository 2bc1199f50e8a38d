"""Which rows travel when (paper, section 4.2.2). Pure functions over sets of row ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_among(ids: Tensor, sorted_ids: Tensor) -> Tensor:
    """Mask of the ids that are in a sorted list. As torch.isin, which sorts both again and takes five times as long."""
    if sorted_ids.numel() == 0:
        return torch.zeros_like(ids, dtype=torch.bool)
    places = torch.searchsorted(sorted_ids, ids).clamp_(max=sorted_ids.numel() - 1)
    return sorted_ids[places] == ids


def prior_rows(touched_T: Tensor, next_ids: Tensor) -> Tensor:
    """Mask of the gradient rows that must be applied before the next step: some rank looks them up there.

    Args:
        touched_T: Rows with a gradient.
        next_ids: All rows that any rank looks up in the next step, sorted.

    Returns:
        True for prior rows, False for delayed ones, [T].
    """
    return is_among(touched_T, next_ids)


def early_rows(wanted_U: Tensor, touched: Tensor, delayed: Tensor) -> Tensor:
    """Mask of the rows of the next step that this step does not move, so that they can travel during its backward.

    ```
    ids(t+1) − touched(t) − delayed(t−1)
    ```

    Delayed rows of the step before are moved in this step, though nobody looks them up in it.

    Args:
        wanted_U: What one rank looks up in the next step.
        touched: All rows that any rank has looked up in this step, sorted.
        delayed: All rows whose update of the step before is still to be applied, sorted.

    Returns:
        The mask, [U].
    """
    return ~(is_among(wanted_U, touched) | is_among(wanted_U, delayed))


def without(wanted_U: Tensor, here: Sequence[Tensor]) -> Tensor:
    """Those of some rows that are not here yet."""
    for ids in here:
        if ids.numel() and wanted_U.numel():
            wanted_U = wanted_U[~torch.isin(wanted_U, ids)]
    return wanted_U
