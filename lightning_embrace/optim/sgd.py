"""SGD for dense and row-sparse parameters together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from lightning_embrace.optim.rows import RowSparse, scalar


class SGD(RowSparse, torch.optim.SGD):
    """:class:`torch.optim.SGD` that also treats sparse gradients row by row.

    Signature, state and state dict are those of :class:`torch.optim.SGD`.

    - A dense gradient: torch's SGD, number for number.
    - A sparse gradient (``nn.Embedding(sparse=True)``): torch's formula on the rows in the gradient. Momentum, Nesterov
      momentum and weight decay act on these rows only; a row without gradient keeps its weight and its momentum,
      whereas torch's SGD moves with momentum every row that was ever touched, and refuses weight decay. The momentum
      buffer is dense and starts at zero, so ``dampening`` dampens a row's first gradient too. ``differentiable`` and
      ``fused`` are refused.
    """

    def _step_rows(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        ids_U = grad.indices()[0]
        rows_Ud = parameter.index_select(0, ids_U)
        buffer_Vd = self._buffer(parameter) if group["momentum"] != 0 else None
        buffer_Ud = None if buffer_Vd is None else buffer_Vd.index_select(0, ids_U)
        sgd(
            [rows_Ud],
            [grad.values()],
            [buffer_Ud],
            has_sparse_grad=False,
            foreach=False,
            fused=False,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=scalar(group["lr"]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        parameter.index_copy_(0, ids_U, rows_Ud)
        if buffer_Vd is not None and buffer_Ud is not None:
            buffer_Vd.index_copy_(0, ids_U, buffer_Ud)

    def _buffer(self, parameter: Tensor) -> Tensor:
        """The momentum of all rows, dense also where torch's SGD left a sparse one."""
        state = self.state[parameter]
        buffer: Tensor | None = state.get("momentum_buffer")
        if buffer is None:
            buffer = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        elif buffer.is_sparse:
            buffer = buffer.to_dense()
        state["momentum_buffer"] = buffer
        return buffer
