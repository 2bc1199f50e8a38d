"""What user code calls: norms of gradients in the place of Lightning's own; tables that grow or begin pretrained."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from lightning_embrace.checkpoint.resize import resize_embedding
from lightning_embrace.checkpoint.vectors import LoadedVectors, load_vectors
from lightning_embrace.optim.clipping import Tell, alone, norms
from lightning_embrace.tables.headers import Act
from lightning_embrace.tables.modules import handle_of

__all__ = ["LoadedVectors", "grad_norm", "load_vectors", "resize_embedding"]


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Computes the norm of each parameter's gradient, and of all of them together.

    Lightning's ``lightning.pytorch.utilities.grad_norm`` with the same arguments and keys. Of a table that is sharded
    it takes all columns, so that every rank has the norms that training in one process has; Lightning's would take this
    rank's columns. Sparse gradients count as the dense ones they stand for. Call it on every rank, for example in
    ``on_before_optimizer_step``. Under any other strategy it needs no other rank.

    Args:
        module: The LightningModule, or a part of it.
        norm_type: p, or ``"inf"``: the largest magnitude.
        group_separator: Stands between the norm's name and the parameter's.

    Returns:
        The norms, ``grad_{p}_norm/{name}``, and ``grad_{p}_norm_total`` where there is any gradient; 0-dimensional, in
        the dtype of the gradients, or in fp32 where theirs is less.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf' (infinity norm). Got {p}")
    shards: set[int] = set()
    tell: Tell = alone
    for part in module.modules():
        handle = handle_of(part)
        if handle is not None:
            shards.add(id(handle.table.parameter))
            tell = partial(handle.source.agree, Act.NORM)
    named = [(name, parameter, parameter.grad) for name, parameter in module.named_parameters()]
    found = [(name, id(parameter) in shards, grad) for name, parameter, grad in named if grad is not None]
    if not found:
        return {}
    single = norms(tell, [grad for _, _, grad in found], [sharded for _, sharded, _ in found], p)
    dtypes = [torch.promote_types(grad.dtype, torch.float32) for _, _, grad in found]
    result = {
        f"grad_{p}_norm{group_separator}{name}": norm.to(grad.device, dtype)
        for (name, _, grad), norm, dtype in zip(found, single, dtypes)
    }
    widest = torch.float64 if torch.float64 in dtypes else torch.float32
    result[f"grad_{p}_norm_total"] = torch.linalg.vector_norm(single, p).to(found[0][2].device, widest)
    return result
