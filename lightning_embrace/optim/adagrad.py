"""Adagrad for dense and row-sparse parameters together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from lightning_embrace.optim.rows import RowSparse, first_step, prepared


class Adagrad(RowSparse, torch.optim.Adagrad):
    """:class:`torch.optim.Adagrad` that also decays the weights of sparse gradients' rows.

    Signature, state and state dict are those of :class:`torch.optim.Adagrad`, and so are the numbers: for dense
    gradients, and for sparse ones (``nn.Embedding(sparse=True)``), of which only the rows move. Beyond torch's,
    ``weight_decay`` may be set with sparse gradients: it adds its L2 penalty to the rows in the gradient.
    ``differentiable`` and ``fused`` are refused with them.
    """

    def _step_rows(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = first_step()
            state["sum"] = torch.full_like(
                parameter, self.defaults["initial_accumulator_value"], memory_format=torch.preserve_format
            )
        adagrad(
            [parameter],
            [prepared(grad, parameter, group["weight_decay"], group["maximize"])],
            [state["sum"]],
            [state["step"]],
            fused=False,
            has_sparse_grad=True,
            foreach=False,
            lr=group["lr"],
            weight_decay=0,
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            maximize=False,
        )
