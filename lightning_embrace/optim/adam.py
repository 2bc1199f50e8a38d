"""Adam and AdamW for dense and row-sparse parameters together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim._functional import sparse_adam

from lightning_embrace.optim.rows import RowSparse, first_step, prepared, scalar


class _AdamRows(RowSparse):
    """SparseAdam's formula on the rows of a gradient."""

    def _move(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = first_step()
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        sparse_adam(
            [parameter],
            [grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [int(state["step"])],
            eps=group["eps"],
            beta1=scalar(beta1),
            beta2=scalar(beta2),
            lr=scalar(group["lr"]),
            maximize=False,
        )


class Adam(_AdamRows, torch.optim.Adam):
    """:class:`torch.optim.Adam` that also takes sparse gradients, each parameter by the kind of its gradient.

    Signature, state and state dict are those of :class:`torch.optim.Adam`.

    - A dense gradient: torch's Adam, number for number.
    - A sparse gradient (``nn.Embedding(sparse=True)``): :class:`torch.optim.SparseAdam`, number for number. Only the
      rows in the gradient move, and only their moments decay; the step count that corrects the bias is the
      parameter's and grows with every step, also one whose gradient has no rows. ``eps`` is added as SparseAdam adds
      it, after the bias correction is taken out of the root, so that rows touched in every step come out a little
      different from Adam's. ``weight_decay`` adds its L2 penalty to the rows in the gradient; ``amsgrad``,
      ``capturable``, ``differentiable`` and ``fused`` are refused.
    """

    def _step_rows(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        grad = prepared(grad, parameter, group["weight_decay"], group["maximize"])
        self._move(group, parameter, grad)


class AdamW(_AdamRows, torch.optim.AdamW):
    """:class:`torch.optim.AdamW` that also takes sparse gradients, each parameter by the kind of its gradient.

    Signature, state and state dict are those of :class:`torch.optim.AdamW`. A dense gradient: torch's AdamW, number for
    number. A sparse one: the rows in the gradient shrink by ``1 - lr * weight_decay`` and then move as
    :class:`lightning_embrace.optim.Adam` moves them; a row without gradient does not decay.
    """

    def _step_rows(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        if group["weight_decay"] != 0:
            ids_U = grad.indices()[0]
            kept = 1 - scalar(group["lr"]) * group["weight_decay"]
            parameter.index_copy_(0, ids_U, parameter.index_select(0, ids_U).mul_(kept))
        self._move(group, parameter, prepared(grad, parameter, 0, group["maximize"]))
