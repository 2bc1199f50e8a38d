"""Gradient clipping of Lightning and of torch, for parameters of which each rank holds some columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from lightning_embrace.mixin import Base
from lightning_embrace.namespaces import Namespace
from lightning_embrace.optim.clipping import Tell, clip_by_norm, clip_by_value, norms
from lightning_embrace.overlay import Overlay
from lightning_embrace.session import Session
from lightning_embrace.tables.headers import Act

_METHODS = ("clip_grad_by_norm", "clip_grad_by_value")
#: where torch (from 2.6 on) looks up what computes the norm of `clip_grad_norm_`, and where users do
_TORCHS_NORM = ((clip_grad, "_get_total_norm"), (utils, "get_total_norm"))


class ClippingMixin(Base):
    """Puts our clipping in the place of the precision plugin's, and our norm in that of torch's, for sharded tables.

    torch's ``clip_grad_norm_`` is what people call in manual optimization and in ``configure_gradient_clipping``. It
    would take the norm of this rank's columns: every rank would clip by another factor, and nobody would notice.
    """

    namespace: ClassVar[Namespace]

    def _take_clipping(self, session: Session, overlay: Overlay) -> None:
        plugin = self.precision_plugin
        base = self.namespace.get("plugins.precision.Precision")
        for name, ours in zip(_METHODS, (_by_norm, _by_value)):
            if getattr(type(plugin), name) is getattr(base, name):  # else the user knows better
                overlay.lay(plugin, name, partial(ours, plugin, session))
        for module, name in _TORCHS_NORM:
            if hasattr(module, name):
                overlay.lay(module, name, partial(_total_norm, session, getattr(module, name)))


def _tell(session: Session) -> Tell:
    return partial(session.rows.agree, Act.NORM)


def _by_norm(plugin: Any, session: Session, optimizer: Optimizer, clip_val: float) -> None:
    sharded = {id(t.parameter) for t in session.tables}
    clip_by_norm(_tell(session), plugin.main_params(optimizer), sharded, float(clip_val))


def _by_value(plugin: Any, session: Session, optimizer: Optimizer, clip_val: float) -> None:
    clip_by_value(plugin.main_params(optimizer), float(clip_val))


def _total_norm(
    session: Session,
    torchs: Callable[..., Tensor],
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """As torch's own, but the gradient of a sharded table has all its columns. Collective if there is such a one."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    shards = {id(t.parameter.grad) for t in session.tables if t.parameter.grad is not None}
    sharded = [id(tensor) in shards for tensor in tensors]
    if not any(sharded):
        return torchs(tensors, norm_type, error_if_nonfinite, foreach)
    single = norms(_tell(session), tensors, sharded, float(norm_type))
    dtype = reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    return torchs([single], norm_type, error_if_nonfinite).to(tensors[0].device, dtype)
