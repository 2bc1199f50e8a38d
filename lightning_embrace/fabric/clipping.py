"""Fabric's gradient clipping, for parameters of which each rank holds some columns."""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_embrace.mixin import Base
from lightning_embrace.optim.clipping import alone, clip_by_norm, clip_by_value
from lightning_embrace.session import Session
from lightning_embrace.tables.headers import Act


class ClippingMixin(Base):
    """By norm, of all columns, and by value."""

    _session: Session | None

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips by the norm of all gradients together. Collective.

        Args:
            module: The module.
            optimizer: The optimizer, whose parameters are meant.
            max_norm: The largest norm.
            norm_type: p, or ``"inf"``.
            error_if_nonfinite: Raise where the norm is none.

        Returns:
            The norm before.

        Raises:
            RuntimeError: The norm is infinite or NaN.
        """
        self.precision.unscale_gradients(optimizer)
        parameters = [p for p in self.precision.main_params(optimizer) if p.grad is not None]
        sharded = {id(t.parameter) for t in self._session.tables} if self._session is not None else set()
        tell = alone if self._session is None else partial(self._session.rows.agree, Act.NORM)
        total = clip_by_norm(tell, parameters, sharded, float(max_norm), float(norm_type), error_if_nonfinite)
        like = parameters[0].grad if parameters else None
        return total if like is None else total.to(like.device, like.dtype)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clamps every element of the gradients."""
        self.precision.unscale_gradients(optimizer)
        clip_by_value(self.precision.main_params(optimizer), float(clip_val))
