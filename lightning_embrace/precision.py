"""What a precision plugin does with gradients, where each rank holds some columns of a table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_embrace.clipping import ClippingMixin
from lightning_embrace.overlay import Overlay
from lightning_embrace.session import Session
from lightning_embrace.tables.headers import Act

#: where torch's GradScaler unscales gradients and looks for overflows, whoever asks it to
_UNSCALE = "_unscale_grads_"


class PrecisionMixin(ClippingMixin):
    """Makes the user's own precision plugin see whole gradients while tables are sharded."""

    _laid_over_precision: Overlay | None = None

    def _take_precision(self, session: Session) -> None:
        self._laid_over_precision = overlay = Overlay()
        self._take_clipping(session, overlay)
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            overlay.lay(scaler, _UNSCALE, partial(_unscale, session, getattr(scaler, _UNSCALE)))

    def _give_precision_back(self) -> None:
        if self._laid_over_precision is not None:
            self._laid_over_precision.remove()
        self._laid_over_precision = None


def _unscale(
    session: Session, unscale: Callable[..., dict[torch.device, Tensor]], optimizer: Optimizer, *args: Any
) -> dict[torch.device, Tensor]:
    """Unscales, and finds an overflow wherever any rank found one. Collective.

    A gradient that overflows reaches the owners of its columns alone: they would skip the step and lower the scale,
    and the others would not.
    """
    found = unscale(optimizer, *args)
    own = any(bool(flag) for flag in found.values())
    if any(overflowed for [overflowed] in session.rows.agree(Act.OVERFLOW, [int(own)])):
        for flag in found.values():
            flag.fill_(1.0)
        session.rows.step_is_skipped()
    return found
