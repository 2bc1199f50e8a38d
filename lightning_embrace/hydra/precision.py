"""What a precision plugin does with all gradients, where most are in the store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_embrace.hydra.optimizer import narrowed
from lightning_embrace.hydra.session import Session
from lightning_embrace.overlay import Overlay

#: where torch's GradScaler unscales gradients and looks for overflows
_UNSCALE = "_unscale_grads_"


class SpilledPrecision:
    """Lays clipping and unscaling over the user's own plugin, whose class, and with it its checkpoints, stay.

    Args:
        plugin: The plugin.
        session: The model's.
    """

    def __init__(self, plugin: Any, session: Session) -> None:
        self._overlay = Overlay()
        self._overlay.lay(plugin, "clip_grad_by_norm", partial(_clip_norm, session, plugin))
        self._overlay.lay(plugin, "clip_grad_by_value", partial(_clip_value, session, plugin))
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None:
            self._overlay.lay(scaler, _UNSCALE, partial(_unscale, session, getattr(scaler, _UNSCALE)))

    def remove(self) -> None:
        """Takes them away."""
        self._overlay.remove()


def _clip_norm(session: Session, plugin: Any, optimizer: Optimizer, clip_val: float) -> None:
    """Torch's ``clip_grad_norm_``: norms of single gradients, then that of all norms in the order of parameters."""
    parameters = list(plugin.main_params(optimizer))
    norms: dict[int, Tensor] = {}

    def measure(chosen: set[int]) -> None:
        found = [p for p in parameters if id(p) in chosen and p.grad is not None]
        for dtype in {p.dtype for p in found}:
            alike = [p for p in found if p.dtype == dtype]
            norms.update(zip(map(id, alike), torch._foreach_norm([p.grad for p in alike], 2.0)))

    session.over_gradients(parameters, measure, changed=False)
    if not norms:
        return
    dtypes: dict[torch.dtype, list[Tensor]] = {}  # torch groups them, in the order in which dtypes first occur
    for parameter in parameters:
        if id(parameter) in norms:
            dtypes.setdefault(parameter.dtype, []).append(norms[id(parameter)])
    stacked = torch.stack([norm for group in dtypes.values() for norm in group])
    factor = torch.clamp(clip_val / (torch.linalg.vector_norm(stacked, 2.0) + 1e-6), max=1.0)

    def scale(chosen: set[int]) -> None:
        gradients = [p.grad for p in parameters if id(p) in chosen and p.grad is not None]
        for gradient in gradients:
            gradient.mul_(factor)

    session.over_gradients(parameters, scale, changed=True)


def _clip_value(session: Session, plugin: Any, optimizer: Optimizer, clip_val: float) -> None:
    parameters = list(plugin.main_params(optimizer))

    def clip(chosen: set[int]) -> None:
        torch.nn.utils.clip_grad_value_([p for p in parameters if id(p) in chosen], clip_val)

    session.over_gradients(parameters, clip, changed=True)


def _unscale(
    session: Session,
    unscale: Callable[..., dict[torch.device, Tensor]],
    optimizer: Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    """Unscales shard by shard; an overflow in any is one in all."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found: dict[torch.device, Tensor] = {}

    def part(chosen: set[int]) -> None:
        with narrowed(optimizer, chosen):
            for device, flag in unscale(optimizer, inv_scale, found_inf, allow_fp16).items():
                found[device] = torch.maximum(found[device], flag) if device in found else flag.clone()

    session.over_gradients(parameters, part, changed=True)
    return found
